"""Compiling a step ahead of time, and what the compiler says where it can't."""

from __future__ import annotations

import dataclasses
import re
import time

import jax

from replicax.errors import CompilationError
from replicax.execution.replicate import Executable

_TOO_MUCH = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available \w+ \(([\d.]+)([KMGT]?)\)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Compilation:
    """How it went.

    Attributes:
      compiled: the program; ``None`` if it does not fit.
      seconds: how long it took.
      needed: if it does not fit, the bytes that it needs on a device, as the compiler says; rounded by it.
      available: the same, those that there are.
      words: what the compiler says of it.
    """

    compiled: jax.stages.Compiled | None
    seconds: float
    needed: int = 0
    available: int = 0
    words: str = ""


def compile_ahead(executable: Executable) -> Compilation:
    """Compile a step for the devices of its mesh, which need not be there.

    Raises:
      CompilationError: the compiler refuses the step for another reason than that it does not fit.
    """
    begin = time.perf_counter()
    try:
        compiled = executable.compiled()
    except Exception as error:  # whatever a compiler raises
        words = " ".join(str(error).split())
        found = _TOO_MUCH.search(words)
        if found is None:
            name = executable.program.name
            platform = executable.mesh.devices.flat[0].platform
            raise CompilationError(f"the step {name!r} was traced, but can't be compiled for {platform}: {words}") from error
        needed, available = (int(float(found[i]) * _UNITS[found[i + 1]]) for i in (1, 3))
        return Compilation(None, time.perf_counter() - begin, needed, available, words)
    return Compilation(compiled, time.perf_counter() - begin)
