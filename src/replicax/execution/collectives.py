"""The collectives of a compiled program, read from its optimised HLO."""

from __future__ import annotations

import dataclasses
import math
import re

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_INSTRUCTION = re.compile(rf"= (?P<shape>\([^=]*?\)|\S+) (?P<kind>{_KINDS})(?:-start)?\(")
_COMMENT = re.compile(r"/\*.*?\*/")  # long tuples are numbered: /*index=5*/
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program.

    Attributes:
      kind: ``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"``, ``"all-to-all"``, ``"collective-permute"``
        or ``"collective-broadcast"``.
      bytes: the size of its result on one device.
      arrays: how many arrays it combines at once.

    >>> import replicax
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> step = lambda x: replicax.get_replica_context().all_reduce("sum", x)
    >>> [c.kind for c in strategy.extended.trace(step, args=(1.0,)).collectives()]
    ['all-reduce']
    """

    kind: str
    bytes: int
    arrays: int


def collectives_in(hlo: str) -> list[Collective]:
    """The collectives of a module, from its text, in order.

    >>> from replicax.execution.collectives import collectives_in
    >>> collectives_in("%r = (f32[8,2]{1,0}, s32[]) all-reduce(%a, %b), channel_id=1")
    [Collective(kind='all-reduce', bytes=68, arrays=2)]
    """
    found = []
    for match in _INSTRUCTION.finditer(_COMMENT.sub("", hlo)):
        arrays = _ARRAY.findall(match["shape"])
        size = sum(_width(kind) * math.prod(int(d) for d in dims.split(",") if d) for kind, dims in arrays)
        found.append(Collective(match["kind"], size, len(arrays)))
    return found


def _width(element: str) -> int:
    bits = re.search(r"\d+", element)
    return max(1, int(bits[0]) // 8) if bits else 1  # "pred" has none
