"""The lines that the equations of a program come from."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jax.extend import source_info_util as _source_infos

from replicax._jax.internals import source_info_util as _source_info
from replicax._jax.jaxprs.types import Equation
from replicax._jax.primitive_families import JITTED
from replicax.errors import UNKNOWN_LINE, shown_line, users_position


def from_line_of(equation: Equation) -> contextlib.AbstractContextManager[None]:
    """Return a context in which traced operations get the line of ``equation``."""
    names = _source_infos.current_name_stack()
    return _source_infos.user_context(equation.source_info.traceback, name_stack=names)


def located(equation: Equation, others: Iterable[Equation]) -> Equation:
    """``equation`` with a line of the user's: its own, or that of the first of ``others`` that has one."""
    if _users_frame(equation) is not None:
        return equation
    return equation.replace(source_info=next((e for e in others if _users_frame(e)), equation).source_info)


def source_line(equation: Equation) -> str:
    """``file.py:12 (function)``: the user's line that an equation comes from."""
    frame = _users_frame(equation)
    return UNKNOWN_LINE if frame is None else f"{shown_line(frame.file_name, frame.line_num)} ({frame.function_name})"


def _frames(equation: Equation) -> Sequence[Any]:
    """The frames in which an equation was recorded, innermost first."""
    traceback: Any = equation.source_info.traceback
    return () if traceback is None else traceback.frames


def _users_frame(equation: Equation) -> Any:
    position = _users_position(equation.source_info.traceback)
    return None if position is None else _frames(equation)[position]


@functools.lru_cache(64)
def _users_position(traceback: Any) -> int | None:
    return None if traceback is None else users_position(code.co_filename for code in traceback.raw_frames()[0])


def source_place(equations: Sequence[Equation]) -> tuple[str, int]:
    """The user's file and line that the last of ``equations`` comes from, after those that it is inside of.

    What JAX has traced for another call of a function that is jitted, and kept, has the line of that call; then it is
    the line of this one.
    """
    place: tuple[str, int] | None = None
    for call, equation in zip([None, *equations], equations, strict=False):
        is_kept = call is not None and call.primitive.name in JITTED
        if place is None or not is_kept or place in {(f.file_name, f.line_num) for f in _frames(equation)}:
            frame = _users_frame(equation)
            place = place if frame is None else (frame.file_name, frame.line_num)
    return place or (UNKNOWN_LINE, 0)


def comes_from(equation: Equation, functions: Collection[str], file: str) -> bool:
    """Return whether an equation was recorded by one of these ``functions``, of a file whose path ends like this."""
    return any(f.function_name in functions and f.file_name.endswith(file) for f in _frames(equation))


def is_backward(equation: Equation) -> bool:
    """Return whether an equation carries a gradient back through a function (``jax.grad``, ``jax.vjp``).

    It is false if that is itself inside of a transformation, as in ``jax.vmap(jax.grad(f))``.
    """
    transforms = (e for e in equation.source_info.name_stack.stack if isinstance(e, _source_info.Transform))
    first = next(transforms, None)
    return first is not None and first.name == "transpose"
