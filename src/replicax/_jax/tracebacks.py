"""Tracebacks that end at the user's line: without the frames of Replicax and JAX.

Public functions leave these frames out of what they raise. What an error says does not change, nor its type. All frames
are there inside of ``replicax.debug()``, and with the environment variable ``REPLICAX_TRACEBACK=full``; those of JAX
also if JAX is to show them (``JAX_TRACEBACK_FILTERING=off``).
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

import jax

Args = ParamSpec("Args")
Result = TypeVar("Result")
Class = TypeVar("Class", bound=type)

VARIABLE = "REPLICAX_TRACEBACK"
"""The environment variable that says whether frames are hidden: ``"full"`` keeps all of them."""


debugging: contextvars.ContextVar[int] = contextvars.ContextVar("debugging", default=0)
"""The number of ``replicax.debug()`` contexts that this thread or task is in."""


def hiding_frames(fn: Callable[Args, Result]) -> Callable[Args, Result]:
    """``fn`` as a public function, whose errors show the frames of users only."""

    @functools.wraps(fn)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        try:
            return fn(*args, **kwargs)
        except BaseException as error:  # also of an interrupt
            hide_frames(error)
            raise  # which, unlike `raise error`, adds no line of this function

    return call


def hiding_frames_of(cls: Class) -> Class:
    """Decorate a public class: errors of its constructor and public methods show the frames of users only."""
    for name, member in list(vars(cls).items()):
        if inspect.isfunction(member) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, hiding_frames(member))
    return cls


def hide_frames(error: BaseException) -> None:
    """Take the frames of Replicax and JAX out of the traceback of ``error``, and of what it came from.

    An error of JAX's that JAX itself has caught is left out as a whole: the user's code had no part in it.
    """
    if debugging.get() or os.environ.get(VARIABLE) == "full":
        return
    hidden = {"replicax", "contextlib"}
    if jax.config.values["jax_traceback_filtering"] != "off":
        hidden |= {"jax", "jaxlib"}
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        source = current.__cause__ or current.__context__
        if source is not None and _is_internal(source, hidden) and not _is_of_replicax(current):
            current.__cause__, current.__suppress_context__ = None, True
            source = None
        vars(current).setdefault(_RAISED_BY, _last_module(current.__traceback__))
        current.__traceback__ = _without(current.__traceback__, hidden)
        current = source


_RAISED_BY = "_replicax_raised_by"
"""An attribute of errors whose frames are hidden: exceptions can't be referred to weakly."""


def raised_by(error: BaseException) -> str:
    """The name of the module that has raised ``error``, also if its frame is hidden."""
    return str(vars(error).get(_RAISED_BY) or _last_module(error.__traceback__))


def _last_module(trace: TracebackType | None) -> str:
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    return str(frames[-1].f_globals.get("__name__")) if frames else ""


def _is_internal(error: BaseException, hidden: set[str]) -> bool:
    """Return whether ``error`` has been raised and caught without any code of the user in between."""
    return error.__traceback__ is not None and _without(error.__traceback__, hidden) is None


def _is_of_replicax(error: BaseException) -> bool:
    """Return whether Replicax raised ``error``; such an error shows its own cause where that helps."""
    return raised_by(error).partition(".")[0] in ("", "replicax")


def _without(trace: TracebackType | None, hidden: set[str]) -> TracebackType | None:
    """The frames that are in none of these packages, nor in modules of Python that these call."""
    kept = []
    is_hidden = False
    while trace is not None:
        package = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        is_hidden = package in hidden or (is_hidden and package in sys.stdlib_module_names)
        if not is_hidden:
            kept.append(trace)
        trace = trace.tb_next
    rebuilt = None
    for one in reversed(kept):
        rebuilt = TracebackType(rebuilt, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return rebuilt
