"""``MultiStepContext``: the outputs of a step among several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from replicax import _jax, context
from replicax.collectives import ReduceOp
from replicax.devices.host_values import as_array, strongly_typed
from replicax.errors import ContextError, TraceError
from replicax.execution.replica_values import ARRAYS
from replicax.execution.tracing.communicator import own_components
from replicax.pytrees import is_leaf, registered
from replicax.values import PerReplica
from replicax.variables.aggregation import Aggregation, combined
from replicax.variables.variable import Variable


class MultiStepContext:
    """What a step of ``Strategy.run_steps`` gets first, and what ``run_steps`` returns.

    Inside a step it takes the outputs; each step sets the same ones. Afterwards it has those of the last step.

    Attributes:
      last_step_outputs: values of the last step by name; ``PerReplica`` where they were set without reducing.
      non_tensor_outputs: Python objects by name.
      steps: how many steps have run: fewer than asked for, if the iterator came to its end. 0 inside a step.

    >>> import replicax, numpy as np
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> def step(ctx, x):
    ...     ctx.set_last_step_output("largest", x.max(), "mean")
    ...     ctx.set_non_tensor_output("rows on each replica", x.shape[0])
    >>> batches = iter(strategy.distribute_dataset([np.arange(4.0), np.arange(4.0, 8.0)]))
    >>> ctx = strategy.run_steps(step, batches, steps=2)
    >>> ctx.last_step_outputs, ctx.non_tensor_outputs, ctx.steps
    ({'largest': Array(6., dtype=float32)}, {'rows on each replica': 2}, 2)
    """

    def __init__(self) -> None:
        self.last_step_outputs: dict[str, Any] = {}
        self.non_tensor_outputs: dict[str, Any] = {}
        self.steps = 0
        self._trace: Any = _jax.current_trace()
        self._open = True

    def __repr__(self) -> str:
        names = {"last_step_outputs": self.last_step_outputs, "non_tensor_outputs": self.non_tensor_outputs}
        return f"MultiStepContext(steps={self.steps}, {', '.join(f'{k}={sorted(v)}' for k, v in names.items())})"

    def set_last_step_output(
        self, name: str, output: Any, reduce_op: ReduceOp | Aggregation | str | None = None
    ) -> None:
        """Let the caller see ``output`` of the last step.

        Args:
          name: under which it is in :attr:`last_step_outputs`. Set again, the later value counts.
          output: a pytree of arrays and numbers.
          reduce_op: how to combine it over the replicas: ``"sum"``, ``"mean"``, ``"only_first_replica"``, a
            :class:`ReduceOp` or an :class:`Aggregation`. In a ``merge_fn`` it may be ``None`` (``"none"``): then a
            ``PerReplica`` value stays one.

        Raises:
          ValueError: no way to combine, in a replica context.
          TypeError: ``output`` has a leaf that is no array.
          ContextError: the step is over.
          TraceError: called inside ``jax.grad``, ``value_and_grad``, ``scan`` and the like.

        At most one all-reduce.
        """
        self._check("set_last_step_output", name)
        op = _parsed_aggregation(name, reduce_op)
        value = jax.tree_util.tree_map_with_path(
            lambda path, leaf: _as_output(f"{name!r}{jax.tree_util.keystr(path)}", leaf),
            registered(output),
            is_leaf=is_leaf,
        )
        if context.get_replica_context() is None:
            value = value if op is None else context.get_strategy().extended.reduce_to(op, value)
            self.last_step_outputs[name] = own_components(value)
            return
        if op is None:
            raise ValueError(
                f"set_last_step_output({name!r}, …) in a replica context must say how to combine the replicas' values: "
                "reduce_op='sum', 'mean' or 'only_first_replica'. To keep one for each replica, set it in a merge_fn: "
                "get_replica_context().merge_call(lambda strategy, value: "
                f"ctx.set_last_step_output({name!r}, value), args=(value,))"
            )
        self.last_step_outputs[name] = combined(value, op)

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Let the caller see ``output``, a Python object that the step does not compute.

        Args:
          name: under which it is in :attr:`non_tensor_outputs`.
          output: any object. The Python of a step runs once, when it is traced, so it is the same for all steps.

        Raises:
          TypeError: ``output`` has arrays in it, which are for :meth:`set_last_step_output`.
          ContextError, TraceError: see :meth:`set_last_step_output`.
        """
        self._check("set_non_tensor_output", name)
        for path, leaf in jax.tree_util.tree_flatten_with_path(registered(output), is_leaf=is_leaf)[0]:
            if isinstance(leaf, jax.Array | PerReplica):
                raise TypeError(
                    f"set_non_tensor_output: {name!r}{jax.tree_util.keystr(path)} is {leaf!r}, and arrays are for "
                    "set_last_step_output"
                )
        self.non_tensor_outputs[name] = output

    def _check(self, method: str, name: Any) -> None:
        if not isinstance(name, str):
            raise TypeError(f"{method}(name, output): name must be a string, got {name!r}")
        if not self._open:
            raise ContextError(f"{method}({name!r}, …) was called on the context of a step that is over")
        if _jax.current_trace() is not self._trace:
            what, replica = _jax.traced_for(_jax.current_trace()), context.get_replica_context()
            examples = None if replica is None else replica._communicator.examples
            if examples is not None and examples.parts > 1:
                inside = "by a step of replicax.loop.accumulated, which returns numbers: "
                inside += "ctx.set_last_step_output('loss', accumulated(step, 4)(batch), 'sum')"
            else:
                inside = f"inside {f'jax.{what}' if what else 'a JAX transformation'}, where values can't leave: "
                inside += "return the value (value_and_grad has has_aux for that), and set it afterwards"
            raise TraceError(f"{method}({name!r}, …) was called {inside}")

    def _closed_outputs(self) -> dict[str, dict[str, Any]]:
        """The outputs that the step has set; it can set no more."""
        self._open = False
        return {"last": self.last_step_outputs, "objects": self.non_tensor_outputs}

    @classmethod
    def _of(cls, returned: Mapping[str, dict[str, Any]], steps: int) -> MultiStepContext:
        """The context of steps that have run, from what the last of them returned."""
        done = cls()
        done._open, done._trace = False, None
        done.last_step_outputs, done.non_tensor_outputs, done.steps = returned["last"], returned["objects"], steps
        return done


def _parsed_aggregation(name: str, op: Any) -> Aggregation | None:
    choice = op.value if isinstance(op, ReduceOp | Aggregation) else op
    if choice is None:
        return None
    try:
        parsed = Aggregation(choice.lower())
    except (AttributeError, ValueError):
        raise ValueError(
            f"set_last_step_output({name!r}, …): reduce_op must be 'sum', 'mean', 'only_first_replica', 'none' or "
            f"None, got {op!r}"
        ) from None
    return None if parsed is Aggregation.NONE else parsed


def _as_output(name: str, leaf: Any) -> Any:
    if isinstance(leaf, PerReplica):
        return leaf
    if isinstance(leaf, Variable):
        leaf = leaf.value
    if not isinstance(leaf, ARRAYS):
        raise TypeError(
            f"set_last_step_output: {name} is {type(leaf).__name__} {leaf!r}, and no array or number: for other "
            "objects there is set_non_tensor_output"
        )
    return strongly_typed(as_array(leaf, f"set_last_step_output: {name}"))
