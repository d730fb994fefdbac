"""The collectives of a compiled program, read from its optimised HLO: which, how often, and between which devices."""

from __future__ import annotations

import collections
import dataclasses
import math
import re

import numpy as np

from replicax.hlo.executed import executed
from replicax.hlo.instructions import Instruction, Module, arrays_in, elements_of, instructions

MOVING = frozenset(["all-gather", "all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast"])
"""Collectives that hand on what they are given, and compute nothing."""

COLLECTIVES = MOVING | {"all-reduce", "reduce-scatter"}

SLICE_AXIS = "slice"
"""The axis of collectives between slices; no mesh has it. Inside of a slice collectives go along the mesh's own axes.
Where one program is for all slices, a collective among several devices of each has both."""

_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_TARGET = re.compile(r'_xla_megascale_target="\{([\d,:]+)\}x')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program.

    Attributes:
      kind: ``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"``, ``"all-to-all"``, ``"ragged-all-to-all"``,
        ``"collective-permute"`` or ``"collective-broadcast"``.
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

    >>> collectives_in("%r = (f32[8,2]{1,0}, s32[]) all-reduce(%a, %b), channel_id=1")
    [Collective(kind='all-reduce', bytes=68, arrays=2)]
    """
    issued: dict[str, str] = {}
    return [
        found
        for instruction in instructions(text)
        if (found := _as_collective(instruction)) is not None and not _is_repeated(instruction, issued)
    ]


def _is_repeated(instruction: Instruction, issued: dict[str, str]) -> bool:
    """Return whether a collective is part of an earlier one; adds it to those ``issued`` so far, by channel, if not.

    The compiler for TPUs lets one collective run beside several computations, and then writes it into each of them:
    under different names, but with the same channel.
    """
    channel = re.search(r"channel_id=(\d+)", instruction.attributes)
    if channel is None or "chain_id=" not in instruction.attributes:
        return False
    return issued.setdefault(channel[1], instruction.name) != instruction.name


def _as_collective(instruction: Instruction) -> Collective | None:
    """The collective that an instruction is, or starts; ``None`` if it is none."""
    kind = instruction.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return None
    arrays = instruction.arrays
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):
        arrays = arrays_in(elements_of(instruction.type)[1])  # the operands come first
    return Collective(kind, sum(array.bytes for array in arrays), len(arrays))


# --- how often, and between whom -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CollectiveUse:
    """A collective that a program issues, as often as it does."""

    kind: str  # as in :class:`Collective`; or ``"send"``, of what a pipeline sends from one logical device to another
    bytes: int  # the bytes of its result on one device
    # The axes of the mesh along which its participants lie: ``"replica"``, ``"logical0"``, …; of what slices tell each
    # other, ``"slice"``.
    axes: tuple[str, ...]
    # The devices of each group, by their places in the mesh, those in most slices first; of a permute, of each chain,
    # the longest first.
    groups: tuple[tuple[int, ...], ...]
    count: int  # how often it is issued in one run
    where: str = ""  # in the traced program, in JAX's words

    @property
    def members(self) -> tuple[int, ...]:
        """The devices of the first group."""
        return self.groups[0]

    @property
    def participants(self) -> int:
        """The number of devices of the first group."""
        return len(self.members)

    @property
    def whole(self) -> int:
        """The bytes of the whole value on each device: of a reduce-scatter, its operand's."""
        return self.bytes * self.participants if self.kind == "reduce-scatter" else self.bytes


@dataclasses.dataclass(frozen=True)
class ProgramDevices:
    """The places of a program's devices.

    Of TPUs in several slices each slice has a program, and a plan is about the first one's. A collective among all is
    there what the devices of a slice do together, and what each then sends to those in its place in the other slices.
    Of other devices there is one program for all slices, and collectives may go beyond a slice.
    """

    axes: dict[str, int]  # the axes of their mesh, and the sizes, in order
    slices: int = 1  # the number of their slices, one after the other
    programs: int = 1  # the number of programs of these slices
    # The places of the devices in a mesh that has others as well; ``None`` if it has not.
    places: tuple[int, ...] | None = None


def collectives_of(module: Module, placement: ProgramDevices) -> list[CollectiveUse]:
    """The collectives of a program, equal ones as one, in the order of their first appearance."""
    uses = uses_in(module, placement)
    counts = collections.Counter[CollectiveUse]()
    for run in executed(module):
        if (use := uses.get(run.instruction.name)) is not None:
            counts[use] += run.times
    return [dataclasses.replace(use, count=count) for use, count in counts.items()]


def uses_in(module: Module, placement: ProgramDevices) -> dict[str, CollectiveUse]:
    """The collectives of a program, by the name of the instruction that is or starts each; all with a count of 1."""
    uses: dict[str, CollectiveUse] = {}
    issued: dict[str, str] = {}
    for run in executed(module):
        use = _use_of(run.instruction, run.computation.name, module, placement)
        if use is not None and not _is_repeated(run.instruction, issued):
            uses[run.instruction.name] = use
    return uses


def _use_of(
    instruction: Instruction, computation: str, module: Module, placement: ProgramDevices
) -> CollectiveUse | None:
    """Return one issue of the collective that an instruction is, or starts; ``None`` if it is none."""
    devices = math.prod(placement.axes.values())
    if placement.programs > 1:
        between = _use_between_slices(instruction, devices // placement.slices, placement.slices)
        if between is not None:
            return between
    collective = _as_collective(instruction)
    if collective is None:
        return None
    if collective.kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        # The compiler for TPUs writes a reduce-scatter as an all-reduce and a slice, fused.
        collective = Collective("reduce-scatter", module.computations[computation].root.bytes, collective.arrays)
    groups = groups_of(instruction, devices // placement.programs)
    if not groups:
        return None
    slices = placement.slices if placement.programs == 1 else 1
    groups.sort(key=lambda group: len({member * slices // devices for member in group}), reverse=True)
    places = placement.places or range(devices)
    return CollectiveUse(
        kind=collective.kind,
        bytes=collective.bytes,
        axes=_axes_of_slices(groups[0], placement.axes, slices),
        groups=tuple(tuple(places[member] for member in group) for group in groups),
        count=1,
        where=plain_name(instruction.op_name),
    )


def _use_between_slices(instruction: Instruction, each: int, slices: int) -> CollectiveUse | None:
    """Return what a slice's first device receives from those of other slices, if an instruction does that."""
    transfer = _TRANSFER.search(instruction.attributes) if instruction.opcode == "recv" else None
    if transfer is None:
        return None
    kind = {"ONE_TO_ONE": "collective-permute"}.get(transfer[1], transfer[1].lower().replace("_", "-"))
    target = _TARGET.search(instruction.attributes)
    participants = _numbers_in(target[1]) if target else slices
    members = tuple(slice_ * each for slice_ in range(participants))
    received = arrays_in(elements_of(instruction.type)[0])  # a context and a token come behind
    return CollectiveUse(kind, sum(a.bytes for a in received), (SLICE_AXIS,), (members,), 1)


def _numbers_in(text: str) -> int:
    """Count the numbers that ``"1,2"`` or ``"1:8"`` stands for."""
    ends = [[int(end) for end in part.split(":")] for part in text.split(",")]
    return sum(end[-1] - end[0] + 1 for end in ends)


def groups_of(instruction: Instruction, devices: int) -> list[tuple[int, ...]]:
    """Return the groups of a collective, as places in the mesh. Of a permute, the chains of senders and receivers.

    All ``devices`` are the group if none is named.
    """
    text = instruction.attributes
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", text):
        return _chains(re.findall(r"\{(\d+),(\d+)", pairs[1] + "}"))
    if found := re.search(r"replica_groups=\{(\{.*?\})\}", text):
        return [tuple(int(i) for i in group.split(",") if i) for group in re.findall(r"\{([\d,]*)\}", found[1])]
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        numbers = np.arange(np.prod([int(d) for d in found[3].split(",")]))
        if found[4]:
            order = [int(d) for d in found[4].split(",")]
            numbers = numbers.reshape([int(d) for d in found[3].split(",")]).transpose(order)
        return [tuple(group) for group in numbers.reshape(int(found[1]), int(found[2])).tolist()]
    if found := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", text):
        return _along(found[1], found[2])
    return [tuple(range(devices))]


def _along(mesh: str, axes: str) -> list[tuple[int, ...]]:
    """The groups along some axes of a mesh, as compilers since JAX 0.12 write them.

    ``mesh`` is like ``'replica'=2,'logical0'=4``, and ``axes`` like ``'replica','logical0':(2)2``, where the second is
    a part of its axis: of 4 devices those 2 that differ in what is left when 2 are taken away before.
    """
    shape: list[int] = []
    inside: list[int] = []
    wanted_axes = {name: (before, size) for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes)}
    for name, count in re.findall(r"'(\w+)'=(\d+)", mesh):
        parts = [int(count)]
        if name in wanted_axes:
            before, size = (int(n) if n else 0 for n in wanted_axes[name])
            parts = [before, size, int(count) // (before * size)] if size else [1, int(count)]
            inside.append(len(shape) + 1)
        shape += parts
    numbers = np.moveaxis(np.arange(math.prod(shape)).reshape(shape), inside, range(-len(inside), 0))
    return [tuple(group) for group in numbers.reshape(-1, math.prod(shape[i] for i in inside)).tolist()]


def _chains(pairs: list[tuple[str, str]]) -> list[tuple[int, ...]]:
    """The devices of each chain of sends, the longest chain first.

    A chain starts at a device that receives nothing, unless it is a ring. Sends of a device to itself are left out.
    """
    following = {int(a): int(b) for a, b in pairs if a != b}
    receivers = set(following.values())
    chains = []
    for first in sorted(following, key=lambda sender: sender in receivers):
        if first not in following:
            continue
        chain = [first]
        while (at := following.pop(chain[-1], first)) != first:
            chain.append(at)
        chains.append(tuple(chain))
    return sorted(chains, key=len, reverse=True)


def axes_of(members: tuple[int, ...], axes: dict[str, int]) -> tuple[str, ...]:
    """The axes of a mesh along which devices lie, which are given by their places in it."""
    places = np.unravel_index(np.array(members), tuple(axes.values()))
    return tuple(name for name, along in zip(axes, places, strict=True) if len(set(along.tolist())) > 1)


def _axes_of_slices(members: tuple[int, ...], axes: dict[str, int], slices: int) -> tuple[str, ...]:
    """Return the mesh axes along which a group's devices, which may lie in several slices, differ."""
    each = math.prod(axes.values()) // slices
    among = len({member // each for member in members})
    if among == 1:
        return axes_of(members, axes)
    return (SLICE_AXIS, *(axes_of(members, axes) if len(members) > among else ()))


def plain_name(op_name: str) -> str:
    """JAX's name of an operation, without what every name begins with."""
    return re.sub(r"^jit\([^()]*\)/(shard_map/)?", "", op_name)
