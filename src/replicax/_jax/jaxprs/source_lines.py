"""The lines that the equations of a program come from."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.extend import source_info_util as _source_infos

from replicax._jax.internals import source_info_util as _source_info
from replicax._jax.jaxprs.types import Equation
from replicax._jax.primitive_families import JITTED

_LIBRARIES = (
    *(os.path.dirname(os.path.abspath(path)) + os.sep for path in (os.__file__, os.path.dirname(jax.__file__))),
    str(pathlib.Path(__file__).absolute().parents[2]) + os.sep,
    "<frozen",
)
"""Where the files are that do not belong to the user's program: Python's, those installed beside JAX, and ours."""


def from_line_of(equation: Equation) -> contextlib.AbstractContextManager[None]:
    """What is traced inside comes from the line that ``equation`` comes from."""
    names = _source_infos.current_name_stack()
    return _source_infos.user_context(equation.source_info.traceback, name_stack=names)


def located(equation: Equation, call: Equation) -> Equation:
    """``equation`` with the line of the ``call`` that it was in, if it has none: one of a function of JAX's own."""
    if _source_info.user_frame(equation.source_info.traceback) is not None:
        return equation
    return equation.replace(source_info=call.source_info)


def source_line(equation: Equation) -> str:
    """``file.py:12 (function)``: the user's line that an equation comes from."""
    frame = _source_info.user_frame(equation.source_info.traceback)
    if frame is None:
        return "an unknown line"
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"


def source_place(equations: Sequence[Equation]) -> tuple[str, int]:
    """The user's file and line that an equation comes from: the innermost that is of no library, if there is one.

    Args:
      equations: the equation, after those that it is inside of. What JAX has traced for another call of a function that
        is jitted, and kept, has the line of that call; then it is the line of this one.
    """
    found: tuple[str, int] | None = None
    for call, equation in zip([None, *equations], equations, strict=False):
        traceback: Any = equation.source_info.traceback
        frames = traceback.frames if traceback is not None else ()
        is_kept = call is not None and call.primitive.name in JITTED
        if found is None or not is_kept or found in {(f.file_name, f.line_num) for f in frames}:
            users = ((f.file_name, f.line_num) for f in frames if not f.file_name.startswith(_LIBRARIES))
            found = next(users, found)
    if found is None:
        frame = _source_info.user_frame(equations[-1].source_info.traceback)
        return ("an unknown line", 0) if frame is None else (frame.file_name, frame.start_line)
    return found


def comes_from(equation: Equation, functions: Collection[str], file: str) -> bool:
    """Whether an equation was recorded by one of these ``functions``, of a file whose path ends like this."""
    traceback = equation.source_info.traceback
    return traceback is not None and any(
        f.function_name in functions and f.file_name.endswith(file) for f in traceback.frames
    )


def is_way_back(equation: Equation) -> bool:
    """Whether an equation carries a gradient back through a function (``jax.grad``, ``jax.vjp``).

    Not so if that is itself inside of a transformation, as in ``jax.vmap(jax.grad(f))``.
    """
    transforms = (e for e in equation.source_info.name_stack.stack if isinstance(e, _source_info.Transform))
    first = next(transforms, None)
    return first is not None and first.name == "transpose"
