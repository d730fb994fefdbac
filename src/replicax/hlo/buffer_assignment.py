"""Read a compiler's layout of memory: XLA's buffer assignment, from the text that it leaves on request."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

_ALLOCATION = re.compile(r"^allocation \d+: size (?P<size>\d+)(?P<about>.*):$")
_ON_HOST = re.compile(r"^allocation \d+: size (\d+), color 5\b", re.MULTILINE)
_VALUE = re.compile(
    r"^ value: <\d+ (?P<name>[\w.\-]+)(?:\{[\d,]*\})? @\d+> \(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?P<type>.+)"
)


@dataclasses.dataclass(frozen=True)
class Value:
    """The result of an instruction, or a part of it, in bytes with padding, at its place in an allocation."""

    instruction: str
    type: str
    size: int
    offset: int


@dataclasses.dataclass(frozen=True)
class Allocation:
    """A piece of main memory, of a size in bytes, and what lies there, one after the other.

    What is temporary is needed in between only; what is constant is an array that is part of the program.
    """

    size: int
    is_argument: bool
    is_output: bool
    is_temporary: bool
    is_constant: bool
    values: tuple[Value, ...]


def bytes_on_host(text: str) -> int:
    """The bytes of the allocations in the host's memory.

    >>> bytes_on_host("allocation 2: size 64, color 5, preallocated-temp:")
    64
    """
    return sum(map(int, _ON_HOST.findall(text)))


def allocations(text: str) -> Iterator[Allocation]:
    """The allocations in the device's main memory.

    >>> found = allocations('''BufferAssignment:
    ... allocation 0: size 64, parameter 0, shape |f32[16]| at ShapeIndex {}, maybe-live-out:
    ...  value: <1 x.1 @0> (size=64,offset=0): f32[16]{0}
    ... allocation 1: size 32, color 1, preallocated-temp:
    ... allocation 2: size 128, preallocated-temp:
    ...  value: <2 add @0> (size=128,offset=0): f32[32]{0}
    ... ''')
    >>> [(a.size, a.is_argument, a.is_output, a.is_temporary, len(a.values)) for a in found]
    [(64, True, True, False, 1), (128, False, False, True, 1)]
    """
    header: re.Match[str] | None = None
    values: list[Value] = []
    for line in [*text.splitlines(), ""]:
        if match := _VALUE.match(line):
            if not match["type"].startswith("("):  # a table of where the parts of a tuple are
                values.append(Value(match["name"], match["type"], int(match["size"]), int(match["offset"])))
            continue
        if header is not None and not re.search(r", color [1-9]|thread-local", header["about"]):
            about = header["about"]
            yield Allocation(
                size=int(header["size"]),
                is_argument=", parameter " in about,
                is_output="maybe-live-out" in about,
                is_temporary="preallocated-temp" in about,
                is_constant=", constant" in about,
                values=tuple(values),
            )
        header, values = _ALLOCATION.match(line), []
