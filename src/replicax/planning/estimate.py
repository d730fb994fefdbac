"""Estimates: how long a step takes at least, and how that grows with the number of replicas.

The roofline: a device that computes at its peak needs ``matrix FLOPs / peak``, one whose memory is never idle
``bytes / bandwidth``, and the network what :mod:`replicax.planning.network` says. If all three overlap completely, the
step takes as long as the longest of them. If communication overlaps with nothing, it takes as long as the longer of the
first two, plus the third. Real steps take longer than with complete overlap: no program reaches every peak.

Scaling is weak: the batch of a replica stays as it is, so more replicas work on more examples. What a replica computes
and moves then stays the same, and only the collectives change, by their formulas. They are taken from the program as it
was compiled for the whole mesh, of which smaller ones are parts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from replicax.devices.mesh import REPLICA_AXIS
from replicax.hlo.collective_instructions import SLICE_AXIS, CollectiveUse
from replicax.planning.chip_specs import Chip
from replicax.planning.cost import Cost
from replicax.planning.network import Network, Shape


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of one step.

    Attributes:
      compute: of matrix products at the chip's peak.
      memory: of reads and writes at the memory's bandwidth.
      communication: of all collectives over the links of a slice, one after the other.
      between_slices: of all that slices tell each other, one after the other.
      arithmetic: of everything else that is computed; 0 where it is not counted.
      launches: of beginning each operation; 0 where it is not counted.
      is_serial: whether one processor does it all, so that nothing overlaps.
    """

    compute: float
    memory: float
    communication: float
    between_slices: float = 0.0
    arithmetic: float = 0.0
    launches: float = 0.0
    is_serial: bool = False

    @property
    def overlapped(self) -> float:
        """If computing, memory, links and network work at the same time: the least that the step can take."""
        return sum(self._parts.values()) if self.is_serial else max(self._parts.values())

    @property
    def sequential(self) -> float:
        """If collectives overlap with nothing."""
        if self.is_serial:
            return self.overlapped
        return max(self.compute, self.memory) + self.communication + self.between_slices

    @property
    def bound_by(self) -> str:
        """What takes longest."""
        return max(self._parts, key=self._parts.__getitem__)

    @property
    def _parts(self) -> dict[str, float]:
        return {
            "compute": self.compute,
            "memory": self.memory,
            "communication": self.communication,
            "the network between slices": self.between_slices,
            "arithmetic": self.arithmetic,
            "launches": self.launches,
        }


@dataclasses.dataclass(frozen=True)
class ScalingPoint:
    """The same step on some number of replicas.

    Attributes:
      replicas: how many.
      chips: the shape of the slice that they fill; of each, if they are several.
      estimate: of the step.
      efficiency: the speed of each replica, as a share of that of one alone, if collectives overlap with nothing.
      efficiency_overlapped: the same, if everything overlaps.
      slices: how many slices they fill.
    """

    replicas: int
    chips: Shape
    estimate: Estimate
    efficiency: float
    efficiency_overlapped: float
    slices: int = 1


def estimate_of(
    cost: Cost,
    uses: Sequence[CollectiveUse],
    device: Chip,
    network: Network,
    grid: Shape | None = None,
    slices: int | None = None,
) -> Estimate:
    """The estimate of a step.

    Args:
      cost: on one device.
      uses: its collectives.
      device: what one JAX device has.
      network: how the chips are linked.
      grid: the replicas along each dim of a slice, if fewer than there are.
      slices: how many, if fewer than there are.
    """
    between = [use for use in uses if SLICE_AXIS in use.axes]
    inside = [use for use in uses if SLICE_AXIS not in use.axes]
    return Estimate(
        compute=cost.matrix_flops / device.flops,
        memory=cost.bytes / device.bandwidth,
        communication=sum(use.count * network.seconds(use, grid) for use in inside),
        between_slices=sum(use.count * network.seconds_between(use, slices or network.slices, grid) for use in between),
        arithmetic=cost.other_flops / device.arithmetic if device.arithmetic else 0.0,
        launches=cost.launches * device.launch,
        is_serial=device.is_serial,
    )


def scaling_of(cost: Cost, uses: Sequence[CollectiveUse], device: Chip, network: Network) -> tuple[ScalingPoint, ...]:
    """Estimates from one replica to a slice and then to all; none if a slice's replicas fill no box of chips."""
    if network.grid is None:
        return ()
    outer = {REPLICA_AXIS, SLICE_AXIS}
    between = [use for use in uses if not outer.isdisjoint(use.axes)]
    inside = [use for use in uses if outer.isdisjoint(use.axes)]
    alone = estimate_of(cost, inside, device, network)
    counted = [(1, (1,) * len(network.grid), 1, alone)]
    one_slice = [(grid, 1) for grid in _grids(network.grid)]
    for grid, slices in (*one_slice, *((network.grid, n) for (n,) in _grids((network.slices,)) if n > 1)):
        replicas = math.prod(grid) * network.replicas_per_block * slices
        if replicas > 1:
            added = estimate_of(cost, between, device, network, grid, slices)
            together = dataclasses.replace(
                alone,
                communication=alone.communication + added.communication,
                between_slices=added.between_slices,
            )
            counted.append((replicas, grid, slices, together))
    return tuple(
        ScalingPoint(
            replicas=replicas,
            chips=network.place(grid),
            estimate=estimate,
            efficiency=_ratio(alone.sequential, estimate.sequential),
            efficiency_overlapped=_ratio(alone.overlapped, estimate.overlapped),
            slices=slices,
        )
        for replicas, grid, slices, estimate in counted
    )


def _grids(whole: Shape) -> list[Shape]:
    """From one block to the whole, each time longer along one dim, the shortest that can grow."""
    grids = [whole]
    while math.prod(grids[-1]) > 1:
        grid = list(grids[-1])
        dim = max(range(len(grid)), key=lambda d: grid[d])
        grid[dim] //= next(p for p in range(2, grid[dim] + 1) if grid[dim] % p == 0)
        grids.append(tuple(grid))
    return grids[::-1]


def _ratio(a: float, b: float) -> float:
    return a / b if b else 1.0
