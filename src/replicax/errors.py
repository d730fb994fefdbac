"""The named errors of Replicax.

Each is a subclass of the built-in exception that a caller would expect, so ``except ValueError`` works
where the meaning is "this input is wrong". Everything else that Replicax raises is a plain ``ValueError``,
``TypeError`` or ``RuntimeError``. All are raised before anything runs, and leave every variable as it was.

What fails while a program runs is not Replicax's: an exception in a host callback (``jax.pure_callback``,
``io_callback``, ``jax.debug.callback``), or a NaN that ``jax.debug_nans`` has found. It comes out of ``strategy.run``,
and the variables have the values from before the step. Where their arrays are gone all the same, as when a device has
run out of memory in the middle of a program, they raise a :class:`VariableLostError` until they are assigned again.
"""

from __future__ import annotations

import os
import sys
import traceback
import types


class LocalityError(ValueError):
    """A value has the wrong locality: per-replica where all replicas must agree, or the reverse.

    Raised while a step is traced (see :mod:`replicax.execution.program.infer`), for example when a per-replica value
    is assigned to a mirrored variable that has no aggregation.
    """


class DeadlockError(ValueError):
    """A collective stands where replicas could disagree on whether, or how often, it runs.

    Raised while a step is traced: some replicas would wait for ever for the others. Also raised where workers
    (processes) don't do the same, or don't come in time.
    """


class PlacementError(ValueError):
    """An operation can't be placed on a logical device.

    Raised while a step is traced, for example when an operation has operands on two of them, and would need a copy that
    nobody has asked for (see :meth:`replicax.Strategy.assign_to_logical_device`).
    """


class ContextError(RuntimeError):
    """A function was called in the wrong context, or contexts were left in the wrong order.

    For example ``strategy.run`` inside a replica, or ``strategy.reduce`` where only one replica's view exists.
    """


class TraceError(RuntimeError):
    """A variable was written inside a JAX transformation, out of which the written value could not come.

    Or it was read where its present value would be frozen into a program that JAX keeps.
    """


class IntegerRangeError(ValueError, OverflowError):
    """An integer of the host is none of those that the array on a device would have.

    With JAX's 64-bit numbers off, as they are by default, an int64 array becomes an int32 one, and 2**40 would be 0.
    """


class AbsentDeviceError(RuntimeError):
    """Something needs devices that are only described, and not there.

    A strategy on such devices (plan mode) compiles steps, and its variables have shapes and no values.
    """


class VariableLostError(RuntimeError):
    """A variable has no value any more.

    The step that was to write it has failed while it ran, after the old value's memory had been taken; or the array
    that ``variable.value`` had given out has been deleted. Assigning a new value makes it as good as new.
    """


class CompilationError(RuntimeError):
    """A step was traced, but the compiler refuses it; the message has the compiler's words."""


class WorkerError(RuntimeError):
    """Another worker (process) has failed, has been interrupted, has ended or has died, so this one can't go on.

    The message names the worker, and says what it raised and where. It is raised wherever workers meet, and where a
    compiled step is launched or broken off; see ``docs/workers.md``.
    """


class RetraceWarning(UserWarning):
    """A function is traced again and again; the message says which part of its key keeps changing."""


class ExecutorWarning(UserWarning):
    """A step runs as plain Python, one replica at a time, because no compiled program could hold its arguments."""


# --- where in the user's code ---------------------------------------------------------------------------


def line_of(error: BaseException) -> str:
    """The user's line that ``error`` comes from."""
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        if _is_users(frame):
            return f"{frame.f_code.co_filename}:{number}"
    return _UNKNOWN


def users_line() -> str:
    """The user's line that this thread is at."""
    frame, _ = _users_frame()
    return _UNKNOWN if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def stack_level() -> int:
    """The stack level of the user's line, for a warning that the caller gives."""
    return _users_frame()[1] - 1


_UNKNOWN = "an unknown line"

PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
"""The folder of Replicax's own source."""


def _users_frame() -> tuple[types.FrameType | None, int]:
    frame, level = sys._getframe(1), 1
    while frame is not None and not _is_users(frame):
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    return frame, level


def _is_users(frame: types.FrameType) -> bool:
    return frame.f_globals.get("__name__", "").split(".")[0] not in ("replicax", "jax", "contextlib")
