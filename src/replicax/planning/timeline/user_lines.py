"""The lines of the user's program that instructions come from."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from replicax.errors import PACKAGE, shown_line
from replicax.hlo.instructions import Instruction, Module

# What is no line of the user's program: a library's, the script that starts a command, and code that is in no file.
_OURS = (PACKAGE, *(sysconfig.get_paths()[name] for name in ("purelib", "stdlib", "scripts")), "<")


class SourceLines:
    """The lines of the user's program that instructions come from."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._outside = set(_lines_of_callers())
        self._callers: dict[str, Instruction] = {}  # of the computation that an instruction stands in, by its name
        for instruction in module.instructions.values():
            for name in instruction.called("body", "condition", "calls", "to_apply", r"\w+_computations?"):
                called = module.computations.get(name)
                self._callers.update(dict.fromkeys(called.instructions if called else (), instruction))

    def of(self, instruction: Instruction) -> str:
        """The innermost line of an instruction, or of the loop or branch that it stands in; empty if neither is known.

        When the step is compiled, JAX adds the instructions that put a loop's results together. Their only lines are
        those of the compilation's callers.
        """
        for file, line in self._module.source(instruction):
            if not file.startswith(_OURS) and (file, line) not in self._outside:
                return Path(shown_line(file, line)).name
        outer = self._callers.get(instruction.name)
        return "" if outer is None else self.of(outer)


def _lines_of_callers() -> Iterator[tuple[str, int]]:
    """Yield the lines of this function and its callers, which are outside of the step."""
    frame = sys._getframe()
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
