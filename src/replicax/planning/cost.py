"""The work of a compiled program on one device: arithmetic, and bytes to and from the device's main memory.

Counted as XLA's ``HloCostAnalysis`` counts, except that a loop counts as often as it runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import numpy as np

from replicax.hlo.collective_instructions import MOVING
from replicax.hlo.executed import executed
from replicax.hlo.instructions import Computation, Instruction, Module
from replicax.hlo.products import convolution_dims, convolution_labels, dot_dims, is_library_product, product_kind


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FREE = _words(
    """
    add-dependency after-all async-done async-start async-update bitcast call conditional constant copy-done
    get-tuple-element opt-barrier parameter partition-id replica-id tuple while
    """
)
_NO_ARITHMETIC = _words(
    """
    all-reduce-done bitcast-convert broadcast concatenate copy copy-start custom-call
    domain dynamic-slice dynamic-update-slice fusion gather infeed iota outfeed pad recv recv-done reshape reverse
    rng-get-and-update-state send send-done slice sort transpose
    """
) | {kind + part for kind in MOVING for part in ("", "-start", "-done")}
_SLICES = frozenset(["dynamic-slice", "slice", "gather"])
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}
"""Instructions that change their first operand in place, and which operand they put into it."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one run on one device.

    Attributes:
      matrix_flops: those of matrix products and convolutions, two for each multiplication with its addition.
      other_flops: those of everything else, one for each number computed.
      bytes: read from and written to main memory.
      unknown_loops: loops for which it is not known how often they run; they are counted once.
      launches: how many operations run, each as one kernel; a fusion is one.
    """

    matrix_flops: int
    other_flops: int
    bytes: int
    unknown_loops: tuple[str, ...]
    launches: int


def cost_of(*modules: Module) -> Cost:
    """The cost of one run of each of these modules."""
    unknown_loops: list[str] = []
    matrix = other = moved = launches = 0
    for module, run in ((m, run) for m in modules for run in executed(m)):
        instruction, computation = run.instruction, run.computation
        matrix += run.times * matrix_flops(instruction, computation)
        other += run.times * other_flops(instruction, computation)
        if not run.is_fused:
            moved += run.times * bytes_moved(module, computation, instruction)
            launches += run.times * is_launched(instruction)
        if run.trips is None:
            unknown_loops.append(instruction.name)
    return Cost(matrix, other, moved, tuple(dict.fromkeys(unknown_loops)), launches)


def is_launched(instruction: Instruction) -> bool:
    """Return whether an instruction outside of fusions is an operation that runs, and not only a name for a value."""
    return not (_is_free(instruction) or instruction.opcode.endswith("-done"))


def _is_free(instruction: Instruction) -> bool:
    return instruction.opcode in _FREE or 'custom_call_target="AllocateBuffer"' in instruction.attributes


def _width(instruction: Instruction) -> int:
    return max(1, instruction.arrays[0].bytes // max(1, math.prod(instruction.arrays[0].dims)))


# --- arithmetic -----------------------------------------------------------------------------------------


def matrix_flops(instruction: Instruction, computation: Computation) -> int:
    """Count the FLOPs of one matrix product or convolution; 0 if the instruction is neither."""
    match product_kind(instruction):
        case "dot":
            return _dot_flops(instruction, computation)
        case "convolution":
            return _convolution_flops(instruction, computation)
    return 0


def other_flops(instruction: Instruction, computation: Computation) -> int:
    """Count the FLOPs of any other instruction, one for each number that it computes or combines."""
    match instruction.opcode:
        case "dot" | "convolution":
            return 0
        case "reduce":
            return computation.instructions[instruction.operands[0]].bytes // _width(instruction)
        case "reduce-window":
            combined = math.prod(int(size) for size in _window_of(instruction)["size"].split("x")) - 1
            return combined * sum(math.prod(a.dims) for a in instruction.arrays)
        case "scatter":
            return math.prod(computation.instructions[instruction.operands[_UPDATES["scatter"]]].arrays[0].dims)
        case opcode if opcode not in _FREE and opcode not in _NO_ARITHMETIC:
            return sum(math.prod(a.dims) for a in instruction.arrays)
    return 0


def _dot_flops(instruction: Instruction, computation: Computation) -> int:
    left = computation.instructions[instruction.operands[0]].arrays[0].dims
    contracted = [left[d] for d in dot_dims(instruction, "lhs_contracting")]
    return 2 * math.prod(instruction.arrays[0].dims) * math.prod(contracted)


def _window_of(instruction: Instruction) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", (re.findall(r"window=\{([^}]*)\}", instruction.attributes) or [""])[0]))


def _convolution_flops(instruction: Instruction, computation: Computation) -> int:
    """Count two for each pair of an input and a kernel element that are multiplied; padding does not count.

    The compiler for TPUs writes matrix products as convolutions too.
    """
    labels = convolution_labels(instruction)
    source, kernel, result = convolution_dims(instruction, computation)
    window = _window_of(instruction)
    groups = {
        name: int((re.findall(rf"{name}_group_count=(\d+)", instruction.attributes) or [1])[0])
        for name in ("feature", "batch")
    }
    pairs = 1
    for d in range(len(labels[0]) - 2):
        size_in, size_kernel, size_out = (
            dims[label.index(str(d))] for dims, label in zip((source, kernel, result), labels, strict=True)
        )
        stride, dilation, kernel_dilation = (
            int(window[key].split("x")[d]) if key in window else 1 for key in ("stride", "lhs_dilate", "rhs_dilate")
        )
        low = int(window["pad"].split("x")[d].split("_")[0]) if "pad" in window else 0
        at = np.arange(size_out)[:, None] * stride + np.arange(size_kernel) * kernel_dilation - low
        inside = (at >= 0) & (at <= (size_in - 1) * dilation) & (at % dilation == 0)
        pairs *= int(inside.sum())
    features_in, batch = source[labels[0].index("f")], source[labels[0].index("b")]
    features_out = result[labels[2].index("f")]
    return 2 * (features_in // groups["feature"]) * features_out * (batch // groups["batch"]) * pairs


# --- memory ---------------------------------------------------------------------------------------------


def bytes_moved(module: Module, computation: Computation, instruction: Instruction, space: int = 0) -> int:
    """Return the bytes that an instruction outside of fusions reads and writes in a memory: the device's main one."""
    opcode = instruction.opcode
    size = functools.partial(_size_in, space)
    if _is_free(instruction):
        return 0
    operands = [computation.instructions[name] for name in instruction.operands]
    if opcode == "copy-start":  # which writes its first result until it is done
        return sum(map(size, operands)) + size(instruction, 1)
    if opcode.endswith("-done"):
        return size(instruction)
    if opcode.endswith("-start"):
        return sum(map(size, operands))
    if opcode == "fusion":
        fused = module.computations[instruction.called("calls")[0]]
        read = sum(_bytes_read(module, fused, i, size(o)) for i, o in enumerate(operands) if size(o))
        return read + _bytes_written(module, fused, fused.root, instruction, space)
    if opcode in _SLICES:
        return (instruction.bytes if size(operands[0]) else 0) + size(instruction)
    if opcode in _UPDATES:
        update = operands[_UPDATES[opcode]].bytes if size(instruction) else 0
        return sum(map(size, operands[1:])) + update * (2 if opcode == "scatter" else 1)
    if is_library_product(instruction):  # whose other results are memory to work in
        return sum(map(size, operands)) + size(instruction, 1)
    return sum(map(size, operands)) + size(instruction)


def _bytes_read(module: Module, fused: Computation, position: int, size: int) -> int:
    """Return the bytes that a fusion reads of an operand: if it uses only slices, those of the slices."""
    parameters = (i for i in fused.instructions.values() if i.opcode == "parameter")
    total, names = 0, {next(i.name for i in parameters if i.arguments == str(position))}
    for user in fused.instructions.values():
        for place, name in enumerate(user.operands):
            if name not in names:
                continue
            inner = module.computations[user.called("calls")[0]] if user.opcode == "fusion" else None
            if user.opcode == "bitcast" or (inner is not None and _is_bitcast(inner)):
                names.add(user.name)
            elif user.opcode in _SLICES and place == 0:
                total += user.bytes
            elif inner is not None:
                total += _bytes_read(module, inner, place, size)
            elif user.opcode not in _UPDATES or place:
                return size
            elif user.opcode == "scatter":  # which combines what is there with the update
                total += fused.instructions[user.operands[_UPDATES["scatter"]]].bytes
    return min(size, total)


def _is_bitcast(fused: Computation) -> bool:
    return {i.opcode for i in fused.instructions.values()} <= {"parameter", "bitcast"}


def _bytes_written(module: Module, fused: Computation, root: Instruction, fusion: Instruction, space: int) -> int:
    """Return the bytes that a fusion writes in a memory: of an array updated in place, only those of the update."""
    arrays = fusion.arrays
    results = [fused.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    if len(results) != len(arrays):
        return _size_in(space, fusion)
    total = 0
    for result, array in zip(results, arrays, strict=True):
        home = fused
        while result.opcode in ("bitcast", "fusion") and len(result.arrays) == 1:
            if result.opcode == "bitcast":
                result = home.instructions[result.operands[0]]
            else:
                home = module.computations[result.called("calls")[0]]
                result = home.root
        update = _UPDATES.get(result.opcode)
        size = array.bytes if update is None else home.instructions[result.operands[update]].bytes
        total += size if array.space == space else 0
    return total


def _size_in(space: int, instruction: Instruction, arrays: int | None = None) -> int:
    """Return the bytes of a result, or of its first ``arrays``, that lie in a memory."""
    return sum(array.bytes for array in instruction.arrays[:arrays] if array.space == space)
