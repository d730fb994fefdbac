"""The part of each variable that each device holds, and the communication between devices in a step.

Both are measured: the parts come from the shardings of the arrays, and the exchanges from the text of the compiled
program.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from replicax.devices.host_values import dtype_and_shape
from replicax.devices.mesh import REPLICA_AXIS
from replicax.hlo.collective_instructions import SLICE_AXIS, ProgramDevices, collectives_of
from replicax.hlo.instructions import parse
from replicax.system.printable import printable
from replicax.variables.layout import Copies, Split

if TYPE_CHECKING:
    from replicax.variables.variable import Variable
    from replicax.workers.replicas import Replicas


@dataclasses.dataclass(frozen=True)
class Column:
    """A device."""

    name: str  # such as ``"cpu:3"``
    replicas: tuple[int, ...]  # the numbers of the replicas that it runs; empty if it only holds variables
    logical_device: int | None  # its number in the replica; ``None`` if it is the only one
    panel: str  # the part of the system that it belongs to, such as ``"worker 0"``; empty if there is only one
    group: str  # its group of replicas, such as ``"group 0"``; empty without groups


Bounds = tuple[tuple[int, int], ...]
"""The start and the end of a part of an array, in each dim."""


@dataclasses.dataclass(frozen=True)
class DevicePart:
    """One device's part of a variable."""

    bounds: Bounds  # the part of a value, without padding
    own: bool  # whether each replica has its own value
    copies: int  # the number of replicas whose values it has; their numbers are consecutive from ``first``
    first: int  # the number of the first of these replicas; 0 if all have the same value
    bytes: int  # the memory of the part

    @property
    def size(self) -> int:
        """The number of elements of one value that it has."""
        return math.prod(end - start for start, end in self.bounds)


@dataclasses.dataclass(frozen=True)
class Holding:
    """The parts of a variable on the devices."""

    name: str  # the variable's
    kind: str  # its dtype and shape
    where: str  # a description of its layout
    shape: tuple[int, ...]  # the shape of one value
    bytes: int  # the bytes of one value
    parts: tuple[DevicePart | None, ...]  # the parts of each device; ``None`` for devices without one

    def shown_dims(self) -> tuple[int | None, int | None]:
        """The two dims that the picture shows: those that are split, and then the largest."""
        split = [
            any(part and part.bounds[dim] != (0, size) for part in self.parts) for dim, size in enumerate(self.shape)
        ]
        order = sorted(range(len(split)), key=lambda dim: (not split[dim], -self.shape[dim], -dim))
        chosen = sorted(order[:2])
        if not chosen:
            return None, None
        return (None, chosen[0]) if len(chosen) == 1 else (chosen[0], chosen[1])

    def share(self, part: DevicePart) -> str:
        """A description of a device's part of the value."""
        if part.own:
            return f"{part.copies} of its own" if part.copies > 1 else "its own"
        whole = math.prod(self.shape)
        if part.size == whole:
            return "all"
        if not part.size:
            return "none"
        return f"1/{whole // part.size}" if whole % part.size == 0 else f"{part.size / whole:.0%}"


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The communication in one run of a program: all collectives of one kind among the same devices."""

    kind: str  # such as ``"all-gather"``
    groups: tuple[tuple[int, ...], ...]  # the devices that communicate with each other, by their places in the mesh
    count: int  # the number of collectives
    bytes: int  # the sum of their results on one device


def columns_of(replicas: Replicas, devices: Sequence[jax.Device], groups: int) -> list[Column]:
    """The columns for ``devices``: those of the mesh, in its order, and then others that hold variables.

    The variables are split over so many ``groups`` of neighbouring replicas.
    """
    each, logical = replicas.per_device, replicas.logical_devices.shape[1]
    slices = max(replicas.slices, 1)
    columns = []
    for i, device in enumerate(devices):
        name = f"{device.platform}:{_number(device) if replicas.lockstep.several else device.id}"
        if i >= replicas.mesh.size:
            columns.append(Column(name, (), None, "", ""))
            continue
        place, member = divmod(i, logical)
        replicas_of_device = tuple(range(place * each, (place + 1) * each))
        panel = f"slice {replicas_of_device[0] * slices // replicas.num_replicas}" if slices > 1 else ""
        if not panel and replicas.lockstep.several:
            panel = f"worker {device.process_index}"
        group = f"group {replicas_of_device[0] * groups // replicas.num_replicas}" if groups > 1 else ""
        columns.append(Column(name, replicas_of_device, member if logical > 1 else None, panel, group))
    return columns


def _number(device: jax.Device) -> int:
    """The number by which the device's own worker names it."""
    return [d for d in jax.devices(device.platform) if d.process_index == device.process_index].index(device)


def devices_that_hold(mesh: Mesh, variables: Sequence[Variable]) -> tuple[jax.Device, ...]:
    """The devices of the mesh in its order, followed by other devices that hold variables."""
    homes = [v.layout.home for v in variables if v.layout.home is not None]
    return tuple(dict.fromkeys([*mesh.devices.flat, *homes]))


def holding_of(variable: Variable, devices: Sequence[jax.Device], per_device: int) -> Holding:
    """The parts of a variable on ``devices``."""
    mesh, layout = variable.replicas.mesh, variable.layout
    array = layout.from_stored(variable.stored(), mesh)
    each_replica = isinstance(layout, Copies)
    shape = variable.shape
    indices: Any = array.sharding.devices_indices_map(array.shape)
    item = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize

    def part(device: jax.Device) -> DevicePart | None:
        if device not in indices:
            return None
        bounds = [index.indices(size)[:2] for index, size in zip(indices[device], array.shape, strict=True)]
        first, last = bounds.pop(0) if each_replica else (0, 1)
        if isinstance(layout, Split):  # without padding
            bounds = [(min(start, n), min(end, n)) for (start, end), n in zip(bounds, shape, strict=True)]
        return DevicePart(tuple(bounds), each_replica, last - first, first, item)

    return Holding(
        printable(variable.name),
        dtype_and_shape(variable),
        layout.describe(mesh, per_device),
        shape,
        math.prod(shape) * array.dtype.itemsize,
        tuple(map(part, devices)),
    )


def exchanges_in(text: str, devices: int, slices: int = 1) -> list[Exchange]:
    """The communication in one run of a compiled program, in the order of first appearance.

    Each of the ``slices`` has its own program: the text is that of the first, and the others are alike.
    """
    counts, sizes = (collections.Counter[tuple[str, tuple[tuple[int, ...], ...]]]() for _ in range(2))
    each = devices // slices
    for use in collectives_of(parse(text), ProgramDevices({REPLICA_AXIS: devices}, slices, programs=slices)):
        alike = range(each) if SLICE_AXIS in use.axes else range(0, devices, each)
        key = use.kind, tuple(tuple(member + first for member in group) for first in alike for group in use.groups)
        counts[key] += use.count
        sizes[key] += use.count * use.bytes
    return [Exchange(*key, count, sizes[key]) for key, count in counts.items()]
