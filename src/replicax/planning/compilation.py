"""Compiling a step ahead of time, and the compiler's text about it, which also a step that does not fit has."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from replicax import _jax
from replicax.errors import CompilationError
from replicax.gpu.cuda_compiler import compile_process
from replicax.hlo.buffer_assignment import Allocation, allocations, bytes_on_host
from replicax.hlo.instructions import Module, parse
from replicax.hlo.live_ranges import LiveRanges, live_ranges

_TOO_MUCH = re.compile(r"exceeds available \w+ \(([\d.]+)([KMGT]?)\)")
_HINTS = (
    (  # what libtpu says of slices that are not there, and of replicas on a part of one, that it can't compile for
        re.compile(r"LogicalDeviceCount|kMaxDeviceCount|total_device_count %|routing_table_index"),
        "its compiler knows few shapes of absent slices, and often only replicas that fill the slice: plan the "
        "smallest slice in which there is room for them, of a shape that one can rent. libtpu says: ",
    ),
    (
        re.compile(r"Unknown backend: 'gpu' requested"),
        "a library calls the host in a way that JAX can't lower without a GPU. If it is Equinox' error_if (as in "
        "Lineax and Optimistix), set the environment variable EQX_ON_ERROR=off for the plan. JAX says: ",
    ),
    (
        re.compile(r"cuDNN not found|cusolverGetVersion"),
        "it uses an operation for which JAX asks CUDA's libraries (cuDNN's attention, jnp.linalg.eig), and they need a "
        "GPU: plan with another, such as implementation='xla' of jax.nn.dot_product_attention. JAX says: ",
    ),
)
"""What compilers, and JAX, say of what needs the devices, and what to add to it."""
_HEAPS = re.compile(r"S\((?!5\))\d+\)|, color (?!5\b)\d+")
"""Marks of heaps in a GPU's main memory: what collectives use, or temporaries, may have one of its own. Only space 5 is
elsewhere, in the host's memory."""
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True, eq=False)
class Compilation:
    """A program that was compiled; or was not, because it does not fit. Equal to no other."""

    module: Module  # the optimised program
    allocations: list[Allocation]  # the allocations of its memory
    live: LiveRanges  # what is in memory when it is fullest; nothing where the compiler does not tell
    host: int  # the bytes of what it keeps in the host's memory
    code: int  # the size of the program with its constants, in bytes; where that is not known, of its constants
    seconds: float  # how long compiling took
    available: int | None  # if it does not fit, the bytes that the compiler says there are; it rounds them
    words: str  # if it does not fit, what the compiler says


def compile_ahead(lower: Callable[[], jax.stages.Lowered], name: str, device: jax.Device) -> Compilation:
    """Compile a program for devices that need not be there.

    ``device`` is one of them. For a GPU that is only described, a process of its own compiles, which XLA may end when
    it fails. The compiler is asked to write its program and its layout of memory to files. It does so even if the
    program turns out not to fit. Raises a CompilationError if the compiler refuses the step for another reason than
    that it does not fit.
    """
    with tempfile.TemporaryDirectory(prefix="replicax-plan-") as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        code, available, words = 0, None, ""
        begin = time.perf_counter()
        try:
            with _jax.without_compilation_cache():  # from which a program would come without its text
                code = _compiled_size(lower(), options, device)
        except CompilationError as error:
            raise refusal(name, device.device_kind, error) from error
        except Exception as error:  # whatever a compiler raises
            words = " ".join(str(error).split())
            found = _TOO_MUCH.search(words)
            if found is None:
                raise refusal(name, device.device_kind, error) from error
            available = int(float(found[1]) * _UNITS[found[2]])
        seconds = time.perf_counter() - begin
        endings = (".txt", "-buffer-assignment.txt", "-live-range.txt")
        program, layout, live = (_text_of_largest(folder, f"after_optimizations{ending}") for ending in endings)
    if not program or not layout:
        raise CompilationError("the compiler has left no text of its program, which a plan is read from")
    if device.platform == "gpu":
        program, layout = (_HEAPS.sub("", text) for text in (program, layout))
    allocated = list(allocations(layout))
    code = code or sum(allocation.size for allocation in allocated if allocation.is_constant)
    on_host = bytes_on_host(layout)
    return Compilation(parse(program), allocated, live_ranges(live), on_host, code, seconds, available, words)


def _compiled_size(lowered: jax.stages.Lowered, options: dict[str, Any], device: jax.Device) -> int:
    """Compile a program; returns its size in bytes."""
    process = compile_process(device)
    if process is not None:
        return process.compile(_jax.compile_request(lowered, options))
    analysis: Any = lowered.compile(options).memory_analysis()
    return int(analysis.generated_code_size_in_bytes)


def refusal(name: str, device_kind: str, error: Exception) -> CompilationError:
    """Make the error to raise if the step ``name`` can't be compiled for devices because of ``error``."""
    words = " ".join(str(error).split())
    return CompilationError(
        f"the step {name!r} was traced, but can't be compiled for {device_kind}: {hint_of(words)}{words}"
    )


def hint_of(words: str) -> str:
    """Return what to do about an error of a compiler, or of JAX; empty if that is not known."""
    return next((hint for said, hint in _HINTS if said.search(words)), "")


def _text_of_largest(folder: str, ending: str) -> str:
    """The text of the largest module: a compiler may make small ones out of parts of a program."""
    return max((path.read_text() for path in Path(folder).glob(f"*{ending}")), key=len, default="")
