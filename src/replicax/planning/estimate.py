"""Bounds and scaling: how long a step takes at least, and how its prediction grows with the number of replicas.

The roofline: a device that computes at its peak for the dtype needs ``matrix FLOPs / peak``, one whose memory is never
idle ``bytes / bandwidth``, and the network what :mod:`replicax.planning.network` says. No step is quicker than the
slowest of these (:class:`Estimate`). How long it takes, the walk through its schedule predicts
(``replicax.planning.timeline``).

Scaling is weak: the batch of a replica stays as it is, so more replicas work on more examples. What a replica computes
and moves then stays the same, and only the collectives change, by their formulas. They are taken from the program as it
was compiled for the whole mesh, of which smaller ones are parts, and so is the schedule.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from replicax.devices.mesh import REPLICA_AXIS
from replicax.hlo.collective_instructions import SLICE_AXIS, CollectiveUse, ProgramDevices, uses_in
from replicax.hlo.executed import calls_of
from replicax.hlo.instructions import Computation, Instruction, Module
from replicax.hlo.products import arithmetic_of
from replicax.planning.chip_specs import Chip
from replicax.planning.cost import bytes_moved, is_launched, matrix_flops, other_flops
from replicax.planning.network import Network, Shape
from replicax.planning.timeline.products import peak_of
from replicax.planning.timeline.walk import ScheduleWalk


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds for which a step needs each resource of a device at its peak; of a branch, the least of its arms.

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
    def at_least(self) -> float:
        """The least that the step can take: computing, memory, links and network work at the same time."""
        return sum(self._parts.values()) if self.is_serial else max(self._parts.values())

    @property
    def bound_by(self) -> str:
        """The resource that takes longest."""
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
    """A step on some number of replicas.

    Attributes:
      replicas: the number of replicas.
      chips: the shape of the slice that they fill; of each, if they are several.
      seconds: the prediction of the step.
      communication: seconds of its collectives.
      exposed: how many of these are not hidden.
      efficiency: the speed of each replica, as a share of that of one alone.
      slices: how many slices they fill.
    """

    replicas: int
    chips: Shape
    seconds: float
    communication: float
    exposed: float
    efficiency: float
    slices: int = 1


def estimate_of(
    programs: Sequence[tuple[Module, ProgramDevices]], sends: Sequence[CollectiveUse], device: Chip, network: Network
) -> Estimate:
    """The bounds of a step: of the programs that a device runs one after the other, and of what it sends in between."""
    found = {module: _least_seconds(module, placement, device, network) for module, placement in dict(programs).items()}
    total: np.ndarray = sum((found[module] for module, _ in programs), np.zeros(len(_RESOURCES)))
    total[_RESOURCES.index("communication")] += sum(use.count * network.seconds(use) for use in sends)
    return Estimate(**dict(zip(_RESOURCES, total.tolist(), strict=True)), is_serial=device.is_serial)


_RESOURCES = ("compute", "memory", "communication", "between_slices", "arithmetic", "launches")


def _least_seconds(module: Module, placement: ProgramDevices, device: Chip, network: Network) -> np.ndarray:
    """Seconds of each resource in a run of a program; of a branch, the least that an arm needs of each."""
    uses = uses_in(module, placement)

    def of_computation(name: str, is_fused: bool) -> np.ndarray:
        computation = module.computations[name]
        total = np.zeros(len(_RESOURCES))
        for instruction in computation.instructions.values():
            total += of_instruction(computation, instruction, is_fused)
            called, times = calls_of(module, computation, instruction)
            inner = [of_computation(name, is_fused or instruction.opcode == "fusion") for name in called]
            if inner:
                once = np.min(inner, axis=0) if instruction.opcode == "conditional" else np.sum(inner, axis=0)
                total += (1 if times is None else times) * once
        return total

    def of_instruction(computation: Computation, instruction: Instruction, is_fused: bool) -> list[float]:
        flops = matrix_flops(instruction, computation)
        use = uses.get(instruction.name)
        sending = [0.0, 0.0]
        if use is not None:
            sending[SLICE_AXIS in use.axes] = network.seconds(use)
            if device.is_serial:  # measured as a whole, with what it reads, adds and writes
                return [0.0, 0.0, *sending, 0.0, 0.0]
        return [
            flops and flops / peak_of(arithmetic_of(instruction, computation), device),
            0.0 if is_fused else bytes_moved(module, computation, instruction) / device.bandwidth,
            *sending,
            other_flops(instruction, computation) / device.arithmetic if device.arithmetic else 0.0,
            0.0 if is_fused else is_launched(instruction) * device.launch,
        ]

    return of_computation(module.entry, False)


def scaling_of(walks: Sequence[ScheduleWalk], network: Network) -> tuple[ScalingPoint, ...]:
    """Predictions from one replica to a slice and then to all; none if a slice's replicas fill no box of chips."""
    if network.grid is None:
        return ()
    smallest = (1,) * len(network.grid)
    places: list[tuple[Shape, int]] = [(grid, 1) for grid in _grids(network.grid)]
    places += [(network.grid, slices) for (slices,) in _grids((network.slices,)) if slices > 1]
    between = {REPLICA_AXIS, SLICE_AXIS}
    points = [_point(walks, lambda use: network.seconds(use) if between.isdisjoint(use.axes) else 0.0, 1)]
    points[0] = dataclasses.replace(points[0], chips=network.place(smallest))
    for grid, slices in places:
        replicas = math.prod(grid) * network.replicas_per_block * slices
        if replicas > 1:
            found = _point(walks, functools.partial(network.seconds, grid=grid, slices=slices), replicas)
            efficiency = points[0].seconds / found.seconds if found.seconds else 1.0
            points.append(dataclasses.replace(found, chips=network.place(grid), slices=slices, efficiency=efficiency))
    return tuple(points)


def _point(walks: Sequence[ScheduleWalk], seconds: Callable[[CollectiveUse], float], replicas: int) -> ScalingPoint:
    runs = [walk.run(seconds) for walk in walks]
    transfers = [transfer for run in runs for transfer in run.transfers.values()]
    return ScalingPoint(
        replicas=replicas,
        chips=(),
        seconds=sum(run.seconds for run in runs),
        communication=sum(t.count * t.each for t in transfers),
        exposed=sum(t.exposed for t in transfers),
        efficiency=1.0,
    )


def _grids(whole: Shape) -> list[Shape]:
    """Return grids from one block to the whole, each longer along one dim, the shortest that can grow."""
    grids = [whole]
    while math.prod(grids[-1]) > 1:
        grid = list(grids[-1])
        dim = max(range(len(grid)), key=lambda d: grid[d])
        grid[dim] //= next(p for p in range(2, grid[dim] + 1) if grid[dim] % p == 0)
        grids.append(tuple(grid))
    return grids[::-1]
