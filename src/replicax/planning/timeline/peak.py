"""List what is in memory when it is fullest, by kind: variables, copies of them, activations, and the rest.

The compiler says which values are in memory then (:mod:`replicax.hlo.live_ranges`). What kind each is follows from the
program: a value that is made of variables alone is a copy of them, gathered or cast; one that is made before the first
instruction of a backward pass, and is still needed after it, is an activation. JAX marks these instructions with
``transpose(…)``; a step without one has no activations.
"""

from __future__ import annotations

import re

from replicax.execution.compiled.replicate import VARIABLES as VARIABLE_ARGUMENTS
from replicax.hlo.instructions import HOST_SPACE, Computation, Instruction, Module, arrays_in, elements_of
from replicax.hlo.live_ranges import LiveRanges
from replicax.planning.memory import Memory

VARIABLES, INPUTS, OUTPUTS = "variables", "batch and other arguments", "outputs"
COPIES, ACTIVATIONS, OTHERS, PROGRAM = "variables, gathered or cast", "activations", "other temporaries", "program"

_PASSED_ON = ("bitcast", "copy", "get-tuple-element")
_FRESH = ("broadcast", "constant", "iota")


def temporaries_by_kind(module: Module, ranges: LiveRanges, temporaries: int) -> dict[str, int]:
    """Bytes of temporaries by their kind, which add up to ``temporaries``, as the compiler has laid them out.

    ``ranges`` is what is in memory when it is fullest, as far as the compiler tells.
    """
    origins = _Origins(module)
    steps = {name: step for step, name in enumerate(ranges.sequence)}
    backward = next((step for name, step in steps.items() if origins.is_backward(name)), len(steps))
    loops = {name for name, i in module.instructions.items() if i.opcode == "while"}
    sizes = {COPIES: 0, ACTIVATIONS: 0}
    for value in ranges.values:
        if (instruction := module.instructions.get(value.instruction)) is None or origins.is_argument(instruction):
            continue
        if _is_on_host(instruction, value.index):
            continue
        begin, end = origins.begin(instruction, steps, value.begin), value.end
        if _is_stacked(instruction) and ranges.sequence[min(end, len(steps) - 1)] in loops:
            end = len(steps)  # the loop hands it on
        if origins.of(instruction, value.index) == {"variable"}:
            sizes[COPIES] += value.size
        elif begin < backward <= end and instruction.opcode not in _FRESH:
            sizes[ACTIVATIONS] += value.size
    classified = sum(sizes.values())
    if classified > temporaries:  # values that share a place count for each
        sizes = {kind: size * temporaries // classified for kind, size in sizes.items()}
    return {kind: size for kind, size in sizes.items() if size} | {OTHERS: temporaries - sum(sizes.values())}


def peak_by_kind(memory: Memory, variables: int, temporaries: dict[str, int]) -> dict[str, int]:
    """Return the bytes in memory when it is fullest, by kind; without kinds of which there is nothing.

    >>> memory = Memory(arguments=100, outputs=90, aliased=80, temporaries=30, code=0, capacity=None)
    >>> peak_by_kind(memory, 96, {"activations": 20, "other temporaries": 10})
    {'variables': 96, 'batch and other arguments': 4, 'activations': 20, 'other temporaries': 10, 'outputs': 10}
    """
    variables = min(variables, memory.arguments)
    kinds = {
        VARIABLES: variables,
        INPUTS: memory.arguments - variables,
        **temporaries,
        OUTPUTS: memory.outputs - memory.aliased,
        PROGRAM: memory.code,
    }
    return {kind: size for kind, size in kinds.items() if size}


def _is_on_host(instruction: Instruction, index: tuple[int, ...]) -> bool:
    """Return whether a result, or that part of a tuple, lies in the host's memory."""
    type_ = instruction.type
    for number in index:
        type_ = elements_of(type_)[number]
    return any(array.space == HOST_SPACE for array in arrays_in(type_))


def _is_stacked(instruction: Instruction) -> bool:
    """Return whether an iteration of a loop puts its part into an array that all have in common."""
    return instruction.op_name.endswith("dynamic_update_slice")


class _Origins:
    """Finds out what each value is made of: variables, the batch (or what is not known), or neither."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._home: dict[str, Computation] = {}
        self._caller: dict[str, Instruction] = {}  # of a loop's body, the loop
        for computation in module.computations.values():
            for instruction in computation.instructions.values():
                self._home[instruction.name] = computation
                for body in instruction.called("body", "condition"):
                    self._caller[body] = instruction
        self._found: dict[tuple[str, tuple[int, ...]], frozenset[str]] = {}

    def is_argument(self, instruction: Instruction) -> bool:
        return instruction.opcode == "parameter" and self._home[instruction.name].name == self._module.entry

    def is_backward(self, name: str) -> bool:
        instruction = self._module.instructions.get(name)
        return instruction is not None and instruction.is_backward and "batch" in self.of(instruction, ())

    def begin(self, instruction: Instruction, steps: dict[str, int], begin: int) -> int:
        """The step in which a value is made; if it is updated in its place, that of the loop that made it."""
        while _is_stacked(instruction) or instruction.opcode in _PASSED_ON:
            home = self._home[instruction.name].instructions
            alike = map(home.__getitem__, instruction.operands)
            updated = next((i for i in alike if i.opcode == "while" or i.arrays == instruction.arrays), None)
            if updated is None:
                break
            instruction = updated
            begin = min(begin, steps.get(instruction.name, begin))
        return begin

    def of(self, instruction: Instruction, index: tuple[int, ...]) -> frozenset[str]:
        """``"variable"`` and ``"batch"``, if a value, or that part of a tuple, is made of them."""
        asked = [(instruction, index)]
        while asked:  # a chain may be as long as a program
            current, part = asked[-1]
            if (current.name, part) in self._found:
                asked.pop()
                continue
            made_of = self._made_of(current, part)
            if isinstance(made_of, frozenset):
                self._found[current.name, part] = made_of
            elif missing := [(i, x) for i, x in made_of if (i.name, x) not in self._found]:
                asked += missing
            else:
                self._found[current.name, part] = frozenset().union(*(self._found[i.name, x] for i, x in made_of))
        return self._found[instruction.name, index]

    def _made_of(
        self, instruction: Instruction, index: tuple[int, ...]
    ) -> frozenset[str] | list[tuple[Instruction, tuple[int, ...]]]:
        """The kinds of an argument, or the values that another instruction takes."""
        home = self._home[instruction.name]
        operands = [home.instructions[name] for name in instruction.operands]
        match instruction.opcode:
            case "parameter" if home.name == self._module.entry:
                return frozenset(["variable" if instruction.op_name.startswith(VARIABLE_ARGUMENTS) else "batch"])
            case "parameter" if home.name in self._caller:
                return self._made_of(self._caller[home.name], index)
            case "parameter" | "conditional":
                return frozenset(["batch"])
            case "while":  # what an iteration hands on is of the kind of what the first one takes
                return [(operands[0], index)]
            case "tuple" if index:
                return [(operands[index[0]], index[1:])]
            case "get-tuple-element":
                [number] = re.findall(r"\bindex=(\d+)", instruction.attributes)
                return [(operands[0], (int(number), *index))]
        return [(operand, ()) for operand in operands]
