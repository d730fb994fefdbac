"""The collectives of a compiled program, read from its optimised HLO."""

from __future__ import annotations

import dataclasses
import re

from replicax.hlo.instructions import Instruction, arrays_in, elements_of, instructions

MOVING = frozenset(["all-gather", "all-to-all", "collective-permute", "collective-broadcast"])
"""Collectives that hand on what they are given, and compute nothing."""

KINDS = MOVING | {"all-reduce", "reduce-scatter"}


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


def collectives_in(text: str) -> list[Collective]:
    """The collectives of a module, from its text, in order.

    >>> from replicax.hlo.collective_instructions import collectives_in
    >>> collectives_in("%r = (f32[8,2]{1,0}, s32[]) all-reduce(%a, %b), channel_id=1")
    [Collective(kind='all-reduce', bytes=68, arrays=2)]
    """
    issued: dict[str, str] = {}
    return [
        found
        for instruction in instructions(text)
        if (found := as_collective(instruction)) is not None and not is_repeated(instruction, issued)
    ]


def is_repeated(instruction: Instruction, issued: dict[str, str]) -> bool:
    """Whether an instruction is a further link of a collective that has been met.

    The compiler for TPUs lets one collective run beside several computations, and then writes it into each of them:
    under other names, and with one channel.

    Args:
      instruction: a collective.
      issued: the names of those that have been met, by their channels; grows.
    """
    channel = re.search(r"channel_id=(\d+)", instruction.attributes)
    if channel is None or "chain_id=" not in instruction.attributes:
        return False
    return issued.setdefault(channel[1], instruction.name) != instruction.name


def as_collective(instruction: Instruction) -> Collective | None:
    """The collective that an instruction is, or starts; ``None`` if it is none."""
    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    arrays = instruction.arrays
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):
        arrays = arrays_in(elements_of(instruction.type)[1])  # the operands come first
    return Collective(kind, sum(array.bytes for array in arrays), len(arrays))
