"""Optimised HLO as data: the text of a compiled program, parsed."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_COMMENT = re.compile(r"/\*.*?\*/")  # long tuples are numbered: /*index=5*/
_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\((?P<rest>.*)$"
)
_ARRAY = re.compile(r"\b(?P<dtype>[a-z]+[0-9]*[a-z0-9]*)\[(?P<dims>[0-9,<=]*)\](?P<layout>\{[^}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
HOST_SPACE = 5
"""The :attr:`Array.space` of what lies in the host's memory."""
_NAME = re.compile(r"%([\w.\-]+(?:#\d+)*)")
_ENTRY_OF_TABLE = re.compile(r"^(\d+) (.+)$")
_NUMBER = re.compile(r"(\w+)=(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """The type of one array."""

    dtype: str  # HLO's name of it: ``"f32"``, ``"bf16"``, ``"pred"``, …
    dims: tuple[int, ...]  # the shape
    space: int = 0  # the memory that it lies in; 0 is the device's main memory (HBM), 5 the host's

    @property
    def bytes(self) -> int:
        """The size of the array, without padding."""
        return -(-_bits(self.dtype) * math.prod(self.dims) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction."""

    name: str  # the name of its result
    opcode: str  # the operation
    type: str  # the type of its result, as it is written
    arrays: tuple[Array, ...]  # the arrays of its result, one after the other
    operands: tuple[str, ...]  # the names of the instructions whose results it takes
    arguments: str  # what stands between the parentheses, as it is written
    attributes: str  # what stands behind them
    is_root: bool  # whether its result is that of its computation

    @property
    def bytes(self) -> int:
        """The size of its result."""
        return sum(array.bytes for array in self.arrays)

    @property
    def op_name(self) -> str:
        """The instruction's place in the traced program, in JAX's words; empty if unknown."""
        return found[1] if (found := re.search(r'op_name="([^"]*)"', self.attributes)) else ""

    @property
    def is_backward(self) -> bool:
        """Return whether it comes from a backward pass."""
        return "transpose(" in self.op_name

    @property
    def is_recomputed(self) -> bool:
        """Return whether the backward pass computes it a second time, to save memory (``jax.checkpoint``)."""
        return "rematted_computation" in self.op_name

    def called(self, *roles: str) -> list[str]:
        """The computations that it calls as one of ``roles``, patterns such as ``"body"`` or ``"calls"``."""
        names: list[str] = []
        for role in roles:
            for match in re.finditer(rf"\b{role}=(?:\{{([^}}]*)\}}|(%[\w.\-]+))", self.attributes):
                names += _NAME.findall(match[1] or match[2])
        return names


@dataclasses.dataclass(frozen=True, slots=True)
class Computation:
    """Instructions by name, in the order in which they run."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next(i for i in self.instructions.values() if i.is_root)


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A program: its computations by name, and which of them runs. Equal to no other."""

    computations: dict[str, Computation]
    entry: str
    text: str = dataclasses.field(repr=False)

    @functools.cached_property
    def instructions(self) -> dict[str, Instruction]:
        """The instructions of all computations, by name."""
        return {name: one for each in self.computations.values() for name, one in each.instructions.items()}

    @functools.cached_property
    def _tables(self) -> dict[str, dict[int, str]]:
        tables: dict[str, dict[int, str]] = {}
        rows: dict[int, str] = {}
        for line in self.text.split("\n\n%", 1)[0].splitlines():
            if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                rows = tables.setdefault(line, {})
            elif match := _ENTRY_OF_TABLE.match(line):
                rows[int(match[1])] = match[2]
        return tables

    def source(self, instruction: Instruction) -> list[tuple[str, int]]:
        """The files and lines that an instruction comes from, the innermost first; empty if that is not known."""
        if found := re.search(r'source_file=("(?:[^"\\]|\\.)*") source_line=(\d+)', instruction.attributes):
            return [(_unquoted(found[1]), int(found[2]))]
        found = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        frame = int(found[1]) if found else 0
        lines: list[tuple[str, int]] = []
        while frame and len(lines) < 100:
            numbers = dict(_NUMBER.findall(self._tables["StackFrames"][frame]))
            place = dict(_NUMBER.findall(self._tables["FileLocations"][int(numbers["file_location_id"])]))
            lines.append((_unquoted(self._tables["FileNames"][int(place["file_name_id"])]), int(place["line"])))
            frame = int(numbers.get("parent_frame_id", 1)) - 1  # counted from 1, and 0 is for none
        return lines


def _unquoted(name: str) -> str:
    """The name of a file from HLO text, which quotes it, and escapes the bytes of letters outside ASCII."""
    return name[1:-1].encode().decode("unicode_escape").encode("latin-1").decode(errors="replace")


def parse(text: str) -> Module:
    """A module from its text.

    >>> module = parse('''
    ... ENTRY %main (x: f32[2,3]) -> f32[2,3] {
    ...   %x = f32[2,3]{1,0} parameter(0)
    ...   ROOT %y = f32[2,3]{1,0} add(%x, %x), metadata={op_name="jit(f)/add"}
    ... }''')
    >>> y = module.computations[module.entry].root
    >>> y.opcode, y.operands, str(y.arrays[0]), y.bytes, y.op_name
    ('add', ('x', 'x'), 'f32[2,3]', 24, 'jit(f)/add')
    """
    computations: dict[str, Computation] = {}
    entry, current = "", Computation("", {})
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations[header["name"]] = Computation(header["name"], {})
            entry = header["name"] if header["entry"] else entry
        elif instruction := _instruction(line):
            for name in instruction.operands:
                _take_out(name, current.instructions)
            current.instructions[instruction.name] = instruction
    return Module(computations, entry, text)


def _take_out(name: str, instructions: dict[str, Instruction]) -> None:
    """Add the instruction that takes an element out of a tuple, where an operand is written as that: ``%x#1``.

    So compilers write it since JAX 0.12; before, such an instruction has a line of its own.
    """
    if "#" not in name or name in instructions:
        return
    whole, _, index = name.rpartition("#")
    _take_out(whole, instructions)
    type_ = elements_of(instructions[whole].type)[int(index)]
    instructions[name] = Instruction(
        name=name,
        opcode="get-tuple-element",
        type=type_,
        arrays=arrays_in(type_),
        operands=(whole,),
        arguments=f"%{whole}",
        attributes=f", index={index}",
        is_root=False,
    )


def instructions(text: str) -> Iterator[Instruction]:
    """Yield all instructions of a text, in order."""
    return (found for line in text.splitlines() if (found := _instruction(line)) is not None)


def _instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(_COMMENT.sub("", line))
    if match is None:
        return None
    arguments, _, attributes = match["rest"].partition(")")
    return Instruction(
        name=match["name"],
        opcode=match["opcode"],
        type=match["type"],
        arrays=arrays_in(match["type"]),
        operands=tuple(_NAME.findall(arguments)),
        arguments=arguments,
        attributes=attributes,
        is_root=match["root"] is not None,
    )


def arrays_in(text: str) -> tuple[Array, ...]:
    """The arrays of a type, one after the other."""
    return tuple(
        Array(
            match["dtype"],
            tuple(int(d.lstrip("<=")) for d in match["dims"].split(",") if d),
            int(space[1]) if (space := _SPACE.search(match["layout"] or "")) else 0,
        )
        for match in _ARRAY.finditer(text)
    )


def elements_of(type_: str) -> list[str]:
    """The elements of a tuple's type, as they are written.

    >>> elements_of("((f32[2]{0:T(8,128)}, f32[3]), u32[])")
    ['(f32[2]{0:T(8,128)}, f32[3])', 'u32[]']
    """
    elements, depth, start = [], 0, 1
    for i, character in enumerate(type_):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or (character == ")" and depth == 0):
            elements.append(type_[start:i].strip())
            start = i + 1
    return [e for e in elements if e]


@functools.cache
def _bits(dtype: str) -> int:
    if dtype in ("token", "opaque"):
        return 0
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8  # "pred" has none
