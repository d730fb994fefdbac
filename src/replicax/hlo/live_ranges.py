"""Read when each value of a compiled program is in memory, and which are when it is fullest, from XLA's text."""

from __future__ import annotations

import dataclasses
import re

_STEP = re.compile(r"^    (\d+):([\w.\-]+)")
_RANGE = re.compile(r"^    ([\w.\-]+)\{([\d,]*)\}:(\d+)-(\d+)$")
_ALIVE = re.compile(r"^    ([\w.\-]+)\{([\d,]*)\}: (\d+) bytes")
_PEAK = re.compile(r"^  Live ranges at (\d+) \(peak\):")


@dataclasses.dataclass(frozen=True)
class LiveValue:
    """The result of an instruction, or a part of it, that is in memory when it is fullest; its size is in bytes.

    ``index`` says which part of a tuple, as ``(1,)``. It is made in step ``begin``, and step ``end`` is the last that
    takes it.
    """

    instruction: str
    index: tuple[int, ...]
    size: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class LiveRanges:
    """A program's steps, and what is in memory when it is fullest."""

    sequence: tuple[str, ...]  # the instruction of each step, with those of loops and branches in between
    values: tuple[LiveValue, ...]  # those that are in memory then


def live_ranges(text: str) -> LiveRanges:
    """Parse the text; without values if it says nothing about the peak.

    >>> found = live_ranges('''HloLiveRange (max 2):
    ...   InstructionSequence:
    ...     0:x
    ...     1:y
    ...     2:z
    ...   BufferLiveRange:
    ...     x{}:0-3
    ...     y{1}:1-2
    ...   Live ranges at 1 (peak):
    ...     x{}: 64 bytes (cumulative: 64 bytes)
    ...     y{1}: 32 bytes (cumulative: 96 bytes)
    ... ''')
    >>> found.sequence, found.values[1]
    (('x', 'y', 'z'), LiveValue(instruction='y', index=(1,), size=32, begin=1, end=2))
    """
    sequence: list[str] = []
    ranges: dict[tuple[str, str], tuple[int, int]] = {}
    alive: list[tuple[str, str, int]] = []
    at = -1
    for line in text.splitlines():
        if found := _PEAK.match(line):
            at = int(found[1])
        elif at >= 0:
            if (found := _ALIVE.match(line)) is None:
                break
            alive.append((found[1], found[2], int(found[3])))
        elif found := _RANGE.match(line):
            ranges[found[1], found[2]] = int(found[3]), int(found[4])
        elif found := _STEP.match(line):
            sequence.append(found[2])
    values = [
        LiveValue(name, tuple(int(n) for n in index.split(",") if n), size, *ranges.get((name, index), (at, at)))
        for name, index, size in alive
    ]
    return LiveRanges(tuple(sequence), tuple(values))
