"""The named errors of Replicax.

Each is a subclass of the built-in exception that a caller would expect, so ``except ValueError`` works
where the meaning is "this input is wrong". Every other error of Replicax is a built-in exception. Those that a
step's Python causes are raised before the step runs, and leave every variable unchanged.

Two kinds of errors occur while a program runs, and are not Replicax's: an exception in a host callback
(``jax.pure_callback``, ``io_callback``, ``jax.debug.callback``), and a NaN that ``jax.debug_nans`` has found.
``strategy.run`` raises them, and the variables keep their values from before the step. If their arrays are lost, as
when a device runs out of memory in the middle of a program, they raise a :class:`VariableLostError` until they are
assigned again.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import site
import sys
import sysconfig
import traceback
import types
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "AbsentDeviceError",
    "CheckpointError",
    "CompilationError",
    "ContextError",
    "DeadlockError",
    "ExecutorWarning",
    "IntegerRangeError",
    "LocalityError",
    "LocalityWarning",
    "PlacementError",
    "ReproducibilityWarning",
    "RetraceWarning",
    "ShareWarning",
    "TraceError",
    "VariableLostError",
    "WorkerError",
]


class LocalityError(ValueError):
    """A value has the wrong locality: per-replica where all replicas must agree, or the reverse.

    Raised while a step is traced (see :mod:`replicax.execution.program.infer`), for example when a per-replica value
    is assigned to a mirrored variable that has no aggregation.
    """


class DeadlockError(ValueError):
    """A collective is inside a loop or branch, and replicas may disagree on whether, or how often, it runs.

    Raised while a step is traced: some replicas would wait for ever for the others. Also raised if workers
    (processes) don't do the same, or don't come in time.
    """


class PlacementError(ValueError):
    """An operation can't be placed on a logical device.

    Raised while a step is traced, for example when the operands of an operation are on two of them: nothing is copied
    unless the step requests it (see :meth:`replicax.Strategy.assign_to_logical_device`).
    """


class ContextError(RuntimeError):
    """A function was called in the wrong context, or contexts were left in the wrong order.

    For example ``strategy.run`` or ``strategy.reduce`` inside a step.
    """


class TraceError(RuntimeError):
    """A variable was written inside a JAX transformation, from which the written value could not be returned.

    Or a variable was read where its present value would become a constant of a program that JAX keeps.
    """


class IntegerRangeError(ValueError, OverflowError):
    """An integer on the host does not fit in the dtype of the array on a device.

    With JAX's 64-bit numbers off, as they are by default, an int64 array becomes an int32 array, and 2**40 would be 0.
    """


class AbsentDeviceError(RuntimeError):
    """A call needs devices that are only described, but do not exist.

    A strategy on such devices (plan mode) compiles steps but can't run them; its variables have shapes but no values.
    """


class VariableLostError(RuntimeError):
    """A variable has lost its value.

    A step took over the memory of its old value and failed while it ran, or the array of ``variable.value`` was
    deleted. Assign a new value, and the variable works again.
    """


class CompilationError(RuntimeError):
    """A step was traced, but the compiler refuses it; the message has the compiler's error."""


class WorkerError(RuntimeError):
    """Another worker (process) has failed, was interrupted, has ended or has died, so this one can't continue.

    The message names the worker, and the error that it raised, with its place. The error is raised where workers
    communicate, and where a compiled step is launched or interrupted; see ``docs/workers.md``.
    """


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is incomplete, with no complete one to use instead.

    The message names the file or worker, and says what is wrong with it. See ``docs/checkpoints.md``.
    """


class RetraceWarning(UserWarning):
    """A function is traced again and again; the message names the part of its key that keeps changing."""


class ShareWarning(UserWarning):
    """A loss or gradient has the wrong scale: for example, replicas sum the gradients of means over their own examples.

    The message says what the sum is instead, and how to fix it; the location of the warning is the line of the loss. It
    is issued when a step is traced for several replicas. If a loss is intended, wrap it in ``replicax.as_share``.
    """


class LocalityWarning(UserWarning):
    """Replicas compute the same where each should compute its own, or differ where they should agree.

    It is issued when a step is traced for several replicas: for a batch that was not distributed, for random numbers
    for each example that are the same on every replica, for rows of another batch that are taken for those of a padded
    one, and for state that was the same everywhere and no longer is.
    """


class ReproducibilityWarning(UserWarning):
    """``reproducible=True`` can't give the same bits here; says why, and how to fix it. See ``docs/replicas.md``."""


class ExecutorWarning(UserWarning):
    """A step runs as plain Python, one replica at a time, because it can't be one compiled program; says why."""


# --- words for messages ---------------------------------------------------------------------------------


def shortened(text: str, most: int = 80) -> str:
    """``text`` for a message, truncated after ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def few(names: Sequence[str], most: int = 3) -> str:
    """Names for a message: only the first ones if there are many."""
    return ", ".join([*names[:most], *(["…"] if len(names) > most else [])])


def described(error: BaseException) -> str:
    """``error`` in words, for another process; of a long text the beginning and the end."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return text if len(text) <= 2000 else f"{text[:1000]} … {text[-1000:]}"


def cant_be_pickled(what: str, instead: str) -> TypeError:
    """The error for a copy or a pickle of ``what``, which belongs to one process; do ``instead``."""
    return TypeError(f"{what} can't be copied or pickled, as it belongs to the devices of this process: {instead}")


# --- the user's line ------------------------------------------------------------------------------------

UNKNOWN_LINE = "an unknown line"
PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
"""The folder of Replicax's own source."""
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_JAX = str(getattr(importlib.util.find_spec("jax"), "origin", None))
_SITES = tuple(
    os.path.join(path, "")
    for path in {
        *site.getsitepackages(),
        site.getusersitepackages(),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        _JAX.removesuffix(os.path.join("jax", "__init__.py")),
    }
)
"""The folders where packages are installed."""
_SCRIPTS = os.path.join(sysconfig.get_path("scripts"), "")  # of projects that are installed; they call these
LIBRARIES = frozenset({"equinox", "flax", "haiku", "jax", "jaxlib", "keras", "numpy", "optax", "replicax"})
"""Packages that call functions of users, and have no variables of theirs."""


@functools.cache
def _folders_of_libraries() -> tuple[str, ...]:
    """The folders of these packages, which may be in another place, such as a folder of ``PYTHONPATH``."""
    found = map(importlib.machinery.PathFinder.find_spec, LIBRARIES)
    specs = [spec for spec in found if spec is not None and spec.submodule_search_locations]
    return tuple(spec.origin.removesuffix("__init__.py") for spec in specs if spec.origin is not None)


@functools.lru_cache(4096)
def _kind(file: str) -> str:
    place = next((folder for folder in _SITES if file.startswith(folder)), None)
    if place is not None and not file.startswith(PACKAGE):
        return "library" if file[len(place) :].split(os.sep)[0] in LIBRARIES else "installed"
    return "library" if file.startswith((PACKAGE, _PYTHON, _SCRIPTS, "<frozen", *_folders_of_libraries())) else "user"


def users_position(files: Iterable[str]) -> int | None:
    """Return which of the stack frames with these source files, innermost first, is the user's; ``None`` if none is.

    It is the first outside of Python's library and the folders of installed packages. If all are inside, the user's
    project is installed there, too, and it is the first frame of a package that steps don't call functions of users
    through, as they do through JAX or Flax.
    """
    installed = None
    for position, file in enumerate(files):
        kind = _kind(file)
        if kind == "user":
            return position
        if kind == "installed" and installed is None:
            installed = position
    return installed


def users_frame_of(error: BaseException) -> tuple[types.FrameType, int] | None:
    """The user's frame that raised ``error``, and the number of its line."""
    frames = list(traceback.walk_tb(error.__traceback__))[::-1]
    position = users_position(frame.f_code.co_filename for frame, _ in frames)
    return None if position is None else frames[position]


def line_of(error: BaseException) -> str:
    """The user's line that raised ``error``."""
    users = users_frame_of(error)
    return UNKNOWN_LINE if users is None else shown_line(users[0].f_code.co_filename, users[1])


def shown_line(file: str, line: int) -> str:
    """``file.py:12``; of a notebook's cell, whose file does not exist, its number as in tracebacks there."""
    cell = _cell(file)
    return f"{file}:{line}" if cell is None else f"{cell}, line {line}"


def _cell(file: str) -> str | None:
    """The name of the notebook's cell that has this file, ``Cell In[3]``; ``None`` if none has."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cell = getattr(getattr(shell, "compile", None), "format_code_name", lambda file: None)(file)
    return None if cell is None else " ".join(cell)


def users_line() -> str:
    """The user's line that this thread executes."""
    frame, _ = _current_frame()
    return UNKNOWN_LINE if frame is None else shown_line(frame.f_code.co_filename, frame.f_lineno)


def users_place() -> tuple[str, int]:
    """The file and number of the user's line that this thread executes, for ``warnings.warn_explicit``."""
    frame, _ = _current_frame()
    return (UNKNOWN_LINE, 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def warn(message: str, kind: type[Warning] = UserWarning) -> None:
    """Issue a warning about the user's line."""
    frame, level = _current_frame()
    if frame is None or _cell(frame.f_code.co_filename) is None:
        warnings.warn(message, kind, stacklevel=level)
    else:  # all cells are one module to Python, which would warn once of the same line of several
        warn_at(message, kind, frame.f_code.co_filename, frame.f_lineno)


__warningregistry__: dict[Any, Any] = {}


def warn_at(message: str, kind: type[Warning], file: str, line: int) -> None:
    """Warn of a mistake in a line; under Python's usual filters once, however often a step is traced."""
    place = _cell(file) or file
    warnings.warn_explicit(message, kind, place, line, registry=__warningregistry__.setdefault(place, {}))


def _current_frame() -> tuple[types.FrameType | None, int]:
    """The user's frame of this thread, and how many frames it is away from the caller's, which has 1."""
    frames: list[types.FrameType] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    position = users_position(frame.f_code.co_filename for frame in frames)
    return (None, len(frames) + 1) if position is None else (frames[position], position + 1)
