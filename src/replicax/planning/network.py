"""Predict the time of a collective on a torus of chips: the formulas, and their sources.

A collective over chips that lie along some dims of a torus uses the links along all of these dims at once. With
``V`` the bytes that each device has when it is done (of a reduce-scatter, before), ``n`` chips, and ``B`` the bytes
that a chip can send per second, summed over the dims: by two links along a dim that wraps around (both ways), by one
along a dim that does not; if other groups of the collective use the same links, only this group's share counts:

======================  ==============================================
all-gather              ``V (n - 1) / n / B + hops``
reduce-scatter          the same
all-reduce              twice that: the one, then the other
all-to-all              ``V k / 4 / B`` of its longest dim of ``k`` chips
collective-permute      ``V / link + 1 hop``
send                    the same: from one logical device of a replica to another
======================  ==============================================

A ragged all-to-all counts as if it filled its result: the program does not say how much it sends.

Slices are joined by a data-center network. There each of ``s`` devices that lie in the same place of ``s`` slices sends
its part by itself, and what it can send is its share of ``N``, the bytes that a chip sends into the network per second:
``V (s - 1) / s / N`` for an all-gather, a reduce-scatter and an all-to-all, twice that for an all-reduce, and
``V / N`` for a permute. The network's delays are not counted, so this is the least that it can take.

Collectives of GPUs take what ``replicax.planning.gpu_collectives`` says.

A hop takes a microsecond, and there are as many as lie between the two chips furthest apart. Source: Austin et al.,
"How to Scale Your Model", 2025, parts 2 and 3, https://jax-ml.github.io/scaling-book.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from replicax.devices.mesh import REPLICA_AXIS, slice_of, slices_of
from replicax.hlo.collective_instructions import SLICE_AXIS, CollectiveUse
from replicax.planning.chip_specs import Chip
from replicax.planning.gpu_collectives import seconds_between_gpus
from replicax.tpu.generations import generation_of

HOP = 1e-6
"""Seconds."""

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Line:
    """The chips of a group along one dim."""

    chips: int  # how many of the group's
    extent: int  # how many chips lie from the first to the last, with those of other groups between them
    wraps: bool  # whether the last one is linked to the first

    @property
    def links(self) -> float:
        """The number of links, one way each, that a chip can use: those of this dim, less what other groups use."""
        return (2 if self.wraps else 1) * self.chips / self.extent

    @property
    def hops(self) -> float:
        """The distance between the two furthest chips."""
        return self.extent / 2 if self.wraps else self.extent - 1


def seconds_of(kind: str, whole: float, lines: Sequence[Line], chip: Chip) -> float:
    """Return the seconds that one collective takes, by the formulas above.

    ``whole`` is their ``V``, in bytes, and ``lines`` are the places of the participants.
    """
    lines = [line for line in lines if line.chips > 1]
    if not lines or not chip.link:
        return whole / chip.bandwidth  # between devices of one chip: through its memory
    n = math.prod(line.chips for line in lines)
    bandwidth = chip.link * sum(line.links for line in lines)
    hops = HOP * sum(line.hops for line in lines)
    once = whole * (n - 1) / n / bandwidth + hops
    match kind:
        case "all-reduce":
            return 2 * once
        case "all-to-all" | "ragged-all-to-all":
            longest = max(lines, key=lambda line: line.chips / line.links)
            return whole * longest.chips / 4 / (chip.link * longest.links) + hops
        case "collective-permute" | "send":
            return whole / chip.link + HOP
        case _:
            return once


class Network:
    """The chips of a program's mesh, and how they are linked.

    Args:
      devices: the devices of the mesh, ``[replicas, logical devices]``, one slice after the other.
      chip: what they are.
      slices: how many slices there are, if the devices don't say it.
    """

    def __init__(self, devices: np.ndarray, chip: Chip, slices: int | None = None) -> None:
        self.chip = chip
        is_gpu = getattr(devices.flat[0], "platform", "") == "gpu"
        self._domains = [slice_of(device) for device in devices.flat] if is_gpu else None  # that NVLink joins
        self.slices = slices or slices_of(devices)
        devices = devices[: len(devices) // self.slices]
        self._flat: list[Any] = list(devices.flat)
        self._generation = generation_of(self._flat[0].device_kind) if hasattr(self._flat[0], "coords") else None
        if self._generation is None:  # no torus that we know: a ring of replicas
            self._coordinates = np.repeat(np.arange(len(devices)), devices.shape[1])[:, None]
        else:
            self._coordinates = np.array([d.coords for d in self._flat])
            self._coordinates -= self._coordinates.min(0)
        self.shape: Shape = tuple(int(n) for n in self._coordinates.max(0) + 1)
        self._devices_per_chip = len(self._coordinates) // len(np.unique(self._coordinates, axis=0))
        block = self._coordinates[: devices.shape[1]]
        self._block: Shape = tuple(len(set(along.tolist())) for along in block.T)
        # How many replicas, or chips shared by some, lie along each dim of a slice; ``None`` if they fill no box.
        self.grid: Shape | None = None
        self.replicas_per_block = 1  # how many replicas share each place of the grid: cores of one chip
        if all(size % part == 0 for size, part in zip(self.shape, self._block, strict=True)):
            grid = tuple(size // part for size, part in zip(self.shape, self._block, strict=True))
            per_block, rest = divmod(len(devices), math.prod(grid))
            if not rest:
                self.grid, self.replicas_per_block = grid, per_block

    @property
    def name(self) -> str:
        """The chips of a slice along x, y and z, ``"8x8x8"``; empty if they have no places.

        Of GPUs the domains that NVLink joins, and the GPUs of each: ``"16x8"``.
        """
        if self._domains is not None:
            sizes = set(collections.Counter(self._domains).values())
            return f"{len(self._domains) // max(sizes)}x{max(sizes)}" if len(sizes) == 1 else ""
        return "" if self._generation is None else "x".join(map(str, self.shape[: self._generation.dims]))

    def chips(self, grid: Shape) -> Shape:
        """The shape, in chips, of the slice that has so many replicas along each dim."""
        return tuple(n * part for n, part in zip(grid, self._block, strict=True))

    def place(self, grid: Shape) -> Shape:
        """Return the shape without a dim that this generation's slices do not have."""
        return self.chips(grid)[: 3 if self._generation is None else self._generation.dims]

    def lines(self, use: CollectiveUse, grid: Shape | None = None) -> list[Line]:
        """Return the places of a collective's participants; with ``grid``, as if there were only those replicas."""
        shape = self.shape if grid is None else self.chips(grid)
        places = self._places(use, shape)
        lines = []
        for dim, (wraps, along) in enumerate(zip(self._wrap(shape), places.T, strict=True)):
            values = sorted(set(along.tolist()))
            count, extent = len(values), values[-1] - values[0] + 1
            around = count > 1 and extent + (values[1] - values[0]) - 1 >= shape[dim]
            if around:
                extent = shape[dim]
            lines.append(Line(count, max(extent, count), wraps and around))
        return lines

    def _places(self, use: CollectiveUse, shape: Shape) -> np.ndarray:
        """Return the chips of the participants that are in a smaller slice of this shape; one at least.

        All of them, if they are logical devices of one replica, of which there is always one.
        """
        places = self._coordinates[list(use.members)]
        inside = (places < np.array(shape)).all(axis=1)
        if REPLICA_AXIS not in use.axes or inside.all():
            return places
        return places[inside] if inside.any() else places[:1]

    def seconds(self, use: CollectiveUse, grid: Shape | None = None, slices: int | None = None) -> float:
        """Return the seconds of one issue of a collective; ``grid``, ``slices``: as if there were only so many."""
        if self._domains is not None:
            is_there = self._coordinates[:, 0] < (self.shape if grid is None else grid)[0]
            domains = [[self._domains[m] for m in group if is_there[m]] for group in use.groups]
            sizes = {(len(set(group)), len(group)) for group in domains}  # all groups wait for the slowest
            return max(seconds_between_gpus(use.kind, use.whole, *size, self.chip) for size in sizes)
        if SLICE_AXIS in use.axes:
            return self._seconds_between(use, slices or self.slices, grid)
        if grid is not None and len(self._places(use, self.chips(grid))) == 1:
            return 0.0
        if self._generation is not None:
            return seconds_of(use.kind, use.whole, self.lines(use, grid), self.chip)
        chip = dataclasses.replace(self.chip, link=self.chip.link * self.chip.links / 2)  # all lead to the others
        return chip.meeting + seconds_of(use.kind, use.whole, self.lines(use, grid), chip)

    def way(self, use: CollectiveUse) -> str:
        """Return what a collective between GPUs goes over, in words; empty for other chips."""
        if self._domains is None or use.participants == 1:
            return ""
        link = "NVLink" if self.chip.links > 1 else "PCIe"
        domains, gpus = max((len({self._domains[m] for m in group}), len(group)) for group in use.groups)
        if domains == 1:
            return link
        return "network" if domains == gpus else f"{link}, network"

    def _seconds_between(self, use: CollectiveUse, slices: int, grid: Shape | None) -> float:
        """Return the seconds of one issue of an exchange between slices, as if there were only so many of them.

        Of several devices of each slice each sends a part, and then they tell each other what they have got.
        """
        each, inside = self._in_a_slice(use, grid)
        among = use.participants // each
        there = max(1, among * slices // self.slices)
        whole = use.whole / each * (there / among if use.kind == "all-gather" else 1)
        once = whole * self._devices_per_chip / self.chip.network if there > 1 else 0.0
        match use.kind:
            case "all-reduce":
                return inside + 2 * once * (there - 1) / there
            case "collective-permute":
                return inside + once
            case _:
                return inside + once * (there - 1) / there

    def _in_a_slice(self, use: CollectiveUse, grid: Shape | None) -> tuple[int, float]:
        """Return how many devices of each slice take part in an exchange between slices, and its seconds in a slice."""
        if use.axes == (SLICE_AXIS,) or use.kind == "collective-permute":
            return 1, 0.0
        each = len(self._flat)
        members = tuple(m % each for m in use.members if m // each == use.members[0] // each)
        size = use.whole // len(members) if use.kind == "reduce-scatter" else use.bytes
        axes = tuple(axis for axis in use.axes if axis != SLICE_AXIS)
        part = dataclasses.replace(use, axes=axes, groups=(members,), bytes=size)
        return len(members), self.seconds(part, grid)

    def _wrap(self, shape: Shape) -> tuple[bool, ...]:
        if self._generation is None:
            return (True,) * len(shape)
        return self._generation.wrap((shape[0], shape[1], shape[2]))
