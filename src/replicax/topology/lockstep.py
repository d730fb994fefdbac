"""Lockstep: all workers do the same things in the same order, and find out at once where they do not.

Workers run the same Python, each on its own. Wherever one has to know something of the others, all come together: to
create a variable, to begin a new program, to meet in the exact executor. They say where they are; whoever is
somewhere else, has raised an error or does not come is named on every worker, and nobody waits for ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import pickle
import traceback
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.errors import DeadlockError
from replicax.topology.workers import DEFAULT_TIMEOUT, CalledOff, Series, Workers


class Lockstep:
    """What the workers of a strategy tell each other, one thing after the other.

    Args:
      workers: who they are.
      name: the topic.
      timeout: how many seconds to wait for the others, where nobody says otherwise.

    >>> from replicax.topology.lockstep import Lockstep
    >>> from replicax.topology.workers import Alone
    >>> Lockstep(Alone()).share("counts its rows", 5)
    [5]
    """

    def __init__(self, workers: Workers, name: str = "lockstep", timeout: float | None = DEFAULT_TIMEOUT) -> None:
        self.workers = workers
        self.timeout = math.inf if timeout is None else timeout
        self._series = Series(workers, name)
        self._told: BaseException | None = None

    @property
    def several(self) -> bool:
        """Whether there are other workers."""
        return self.workers.count > 1

    def share(self, doing: str, item: Any, detail: str = "", timeout: float | None = None) -> list[Any]:
        """What all workers bring, in their order.

        Args:
          doing: what this worker does (``"creates a variable"``); all must do the same.
          item: what it brings: Python objects that can be pickled, and arrays of this worker.
          detail: what else to say of it, should the workers not do the same.
          timeout: how many seconds to wait for the others, if not as long as usual.

        Raises:
          DeadlockError: workers do something else, or don't come in time; names them.
          Exception: what another worker has raised, with a note that says where; a ``RuntimeError`` if it can't be
            brought here.
        """
        if not self.several:
            return [item]
        try:
            return self._share(_Message(doing, detail, dumps(item)), timeout)
        except BaseException as error:
            self._told = error
            raise

    def _share(self, message: _Message, timeout: float | None) -> list[Any]:
        timeout = self.timeout if timeout is None else min(timeout, self.timeout)
        try:
            said: list[_Message] = [pickle.loads(m) for m in self._series.exchange(pickle.dumps(message), timeout)]
        except TimeoutError as error:
            raise DeadlockError(f"worker {self.workers.index} {message.shown()}, and {error}") from None
        for worker, theirs in enumerate(said):
            if theirs.failure is not None:
                raise theirs.failure.error(worker)
        if len({m.doing for m in said}) > 1:
            places = "; ".join(f"worker {w} {m.shown()}" for w, m in enumerate(said))
            raise DeadlockError(
                f"the workers do not do the same: {places}. All workers must run the same program, with the same "
                "steps, variables and datasets in the same order."
            )
        return [loads(m.item) for m in said]

    def fail(self, error: BaseException, who: str) -> None:
        """Tell the others, who will come to :meth:`share`, that this worker has raised ``error``, and don't wait.

        Args:
          error: what was raised; nothing is said if the others have raised it, too.
          who: what to say of where it was raised, such as ``"replica 3 of 4"``.
        """
        if not self.several or error is self._told:
            return
        self._told = error
        with contextlib.suppress(CalledOff):  # they come later
            self._series.exchange(
                pickle.dumps(_Message("fails", "", b"", _Failure.of(error, who))), called_off=lambda: True
            )

    def is_known(self, error: BaseException) -> bool:
        """Whether all workers know of ``error``."""
        return error is self._told

    def everywhere(self, error: BaseException) -> BaseException:
        """``error``, which every worker is about to raise, so that none need be told."""
        self._told = error
        return error

    def agree(self, doing: str, item: Any, detail: str = "") -> tuple[Any, int] | None:
        """The first worker whose item differs from the chief's, with the chief's item; ``None`` if all are equal.

        Args: as for :meth:`share`, also for what it raises.
        """
        items = self.share(doing, item, detail)
        return next(((items[0], w) for w, theirs in enumerate(items) if theirs != items[0]), None)


@dataclasses.dataclass(frozen=True)
class _Message:
    doing: str
    detail: str
    item: bytes
    failure: _Failure | None = None

    def shown(self) -> str:
        return f"{self.doing} {self.detail}".rstrip()


@dataclasses.dataclass(frozen=True)
class _Failure:
    """An error on its way to other workers."""

    who: str
    line: str
    text: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException, who: str) -> _Failure:
        pickled = None
        if isinstance(error, Exception):  # what ends a process, such as Ctrl-C, ends that one only
            try:
                pickled = pickle.dumps(error)
                pickle.loads(pickled)
            except Exception:
                pickled = None
        return cls(who, _line_of(error), f"{type(error).__name__}: {error}", pickled)

    def error(self, worker: int) -> BaseException:
        error: BaseException
        try:
            error = RuntimeError(self.text) if self.pickled is None else pickle.loads(self.pickled)
        except Exception:
            error = RuntimeError(self.text)
        error.__dict__.pop("__notes__", None)  # about frames that are not here
        error.add_note(f"(raised by {self.who} on worker {worker}, at {self.line})")
        return error


def _line_of(error: BaseException) -> str:
    """The user's line that ``error`` comes from."""
    frames: Sequence[Any] = list(traceback.walk_tb(error.__traceback__))
    for frame, number in reversed(frames):
        if frame.f_globals.get("__name__", "").split(".")[0] not in ("replicax", "jax", "contextlib"):
            return f"{frame.f_code.co_filename}:{number}"
    return "an unknown line"


# --- objects on their way -------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Arrays travel as their bytes, dtype and shape, whatever the dtype; keys with the name of their generator."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, jax.Array):
            return NotImplemented
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return _key, (np.asarray(jax.random.key_data(value)), str(jax.random.key_impl(value)))
        return jnp.asarray, (np.asarray(value),)


def _key(numbers: np.ndarray, generator: str) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(numbers), impl=generator)


def dumps(item: Any) -> bytes:
    """``item`` as bytes; see :func:`loads`."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(item)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """What :func:`dumps` was given, on this worker's default device.

    >>> import jax.numpy as jnp
    >>> from replicax.topology.lockstep import dumps, loads
    >>> loads(dumps({"x": jnp.ones(2, jnp.bfloat16)}))
    {'x': Array([1, 1], dtype=bfloat16)}
    """
    return pickle.loads(data)
