"""Count the instructions that a compiled program executes, each with how many times.

XLA's own cost analysis counts the body of a loop once, however often it runs. A model whose layers are a scan would
look as cheap as one of its layers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from replicax.hlo.instructions import Computation, Instruction, Module

_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_PASSES_ON = ("copy", "bitcast", "convert", "copy-done", "copy-start")


@dataclasses.dataclass(frozen=True)
class Executed:
    """An instruction that runs."""

    instruction: Instruction  # which
    computation: Computation  # where it stands
    times: int  # how often it runs in one run of the program
    # How often it runs what it calls each time: a loop its body; ``None`` if that is not known, and it counts as once.
    trips: int | None
    is_fused: bool  # whether it is part of a fusion, whose inner values lie in no memory
    in_arm: bool  # whether it stands in an arm of a branch, which not every device may take


def executed(module: Module) -> Iterator[Executed]:
    """Yield all that a program runs, in order.

    A branch counts as if each of its arms ran, as some replica or step may take any of them.
    """

    def within(name: str, times: int, is_fused: bool, in_arm: bool) -> Iterator[Executed]:
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            inner, trips = calls_of(module, computation, instruction)
            yield Executed(instruction, computation, times, trips, is_fused, in_arm)
            repeated = times * (1 if trips is None else trips)
            fused, arm = is_fused or instruction.opcode == "fusion", in_arm or instruction.opcode == "conditional"
            for called in inner:
                yield from within(called, repeated, fused, arm)

    return within(module.entry, 1, False, False)


def calls_of(module: Module, computation: Computation, instruction: Instruction) -> tuple[list[str], int | None]:
    """The computations that an instruction runs, and how often each; ``None`` if that is not known."""
    match instruction.opcode:
        case "while":
            return instruction.called("body"), trip_count(module, computation, instruction)
        case "conditional":
            return instruction.called("branch_computations", "true_computation", "false_computation"), 1
        case "call" | "fusion" | "async-start":
            return instruction.called("to_apply", "calls"), 1
    return [], 1  # what else is called (to_apply of a reduction) is applied to single numbers


def parts_of(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    """Yield what one kernel computes, each with the computation that it stands in: of a fusion what is inside of it."""
    if instruction.opcode not in ("fusion", "call", "async-start"):
        yield computation, instruction
        return
    for name in instruction.called("calls", "to_apply"):
        inner = module.computations[name]
        for part in inner.instructions.values():
            yield from parts_of(module, inner, part)


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Return how often the body of a loop runs; ``None`` if that can't be told.

    The compiler for CPUs and GPUs writes it down. The one for TPUs does not: there it follows from a condition that
    compares a counter with a constant, if the counter starts from a constant and grows by a constant: by one, or by two
    where the compiler has unrolled a loop that computes with one part while it sends another.
    """
    if found := _TRIPS.search(loop.attributes):
        return int(found[1])
    condition = module.computations[loop.called("condition")[0]]
    compare = condition.root
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    counter, limit = (_origin(condition, name) for name in compare.operands)
    if counter.opcode != "get-tuple-element":
        return None
    index = int(re.findall(r"\bindex=(\d+)", counter.attributes)[0])
    growth = _growth(module.computations[loop.called("body")[0]], index)
    if growth is None:
        return None
    initial = _origin(computation, loop.operands[0])
    if initial.opcode != "tuple":
        return None
    start = _origin(computation, initial.operands[index])
    numbers = [i.arguments if i.opcode == "constant" else "" for i in (start, limit)]
    if not all(re.fullmatch(r"-?\d+", n) for n in numbers):
        return None
    return max(0, -((int(numbers[0]) - int(numbers[1])) // growth))


def _growth(body: Computation, index: int) -> int | None:
    """Return by how much a counter grows each time; ``None`` if that is not a known number above 0."""
    if body.root.opcode != "tuple":
        return None
    new = _origin(body, body.root.operands[index])
    if new.opcode != "add":
        return None
    operands = {o.opcode: o for o in (_origin(body, name) for name in new.operands)}
    if set(operands) != {"get-tuple-element", "constant"} or not operands["constant"].arguments.isdigit():
        return None
    if int(re.findall(r"\bindex=(\d+)", operands["get-tuple-element"].attributes)[0]) != index:
        return None
    return int(operands["constant"].arguments) or None


def _origin(computation: Computation, name: str) -> Instruction:
    """The instruction that computes a value: copies and casts of it are skipped."""
    instruction = computation.instructions[name]
    while instruction.opcode in _PASSES_ON and instruction.operands:
        instruction = computation.instructions[instruction.operands[0]]
    return instruction
