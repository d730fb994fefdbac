"""Options of ``run``: which executor runs a step."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import Any, Literal

Executor = Literal["compiled", "per_replica"]


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of ``Strategy.run``.

    Attributes:
      executor: ``"compiled"``, one compiled program for all replicas; or ``"per_replica"``, the step as plain
        Python, one replica at a time, on concrete values.
      experimental_enable_dynamic_batch_size: whether batches may differ in size. They may; ``False`` changes nothing.
      experimental_bucketizing_dynamic_shape: must be false. Use ``InputOptions(partial_batch="pad")``.
      experimental_xla_options: must be ``None``. Set the environment variable ``XLA_FLAGS``.

    Raises:
      ValueError: there is no such executor; or an option that Replicax does not have (the message names its own).

    >>> import replicax
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> def step():
    ...     print("replica", replicax.get_replica_context().replica_id_in_sync_group)
    >>> strategy.run(step, options=replicax.RunOptions(executor="per_replica"))
    replica 0
    replica 1
    """

    executor: Executor = "compiled"
    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None

    def __post_init__(self) -> None:
        if self.executor not in ("compiled", "per_replica"):
            raise ValueError(f"RunOptions: executor must be 'compiled' or 'per_replica', got {self.executor!r}")
        if self.experimental_bucketizing_dynamic_shape:
            raise ValueError(
                "RunOptions: experimental_bucketizing_dynamic_shape is not supported: there is one program for each "
                "size, or one for all sizes with InputOptions(partial_batch='pad')"
            )
        if self.experimental_xla_options is not None:
            raise ValueError(
                "RunOptions: experimental_xla_options is not supported: set the environment variable XLA_FLAGS before "
                "JAX makes its devices"
            )


COMPILED, _PER_REPLICA = RunOptions("compiled"), RunOptions("per_replica")


class _Debugging(threading.local):
    depth = 0


_debugging = _Debugging()


def debug() -> contextlib.AbstractContextManager[None]:
    """Run steps as plain Python: one replica at a time, with ``print``, ``breakpoint()`` and real values.

    Inside this context ``strategy.run`` uses the executor ``"per_replica"`` unless its options say otherwise. The
    results are those of the compiled program; it is slower.

    >>> import replicax
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> x = strategy.distribute_values_from_function(lambda ctx: 10.0 * ctx.replica_id_in_sync_group)
    >>> def step(x):
    ...     if x > 5:  # a compiled step could not do this
    ...         print("large:", x)
    ...     return replicax.get_replica_context().all_reduce("sum", x)
    >>> with replicax.debug():
    ...     strategy.run(step, args=(x,))
    large: 10.0
    Array(10., dtype=float32)
    """
    return _Debug()


class _Debug(contextlib.ContextDecorator):
    """It holds until it is left, also if no reference to it is kept; see :class:`replicax.context.Scope`."""

    def __enter__(self) -> None:
        _debugging.depth += 1

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        _debugging.depth -= 1


def default_options() -> RunOptions:
    """The options of a ``run`` that names none."""
    return _PER_REPLICA if _debugging.depth else COMPILED
