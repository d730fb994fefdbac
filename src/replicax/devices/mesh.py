"""The device mesh: one axis for the replicas, and further axes for the logical devices of a replica."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from replicax import _jax

REPLICA_AXIS = "replica"
"""The mesh axis of the replicas: the axis name for ``jax.lax`` collectives in a step, and for layers that reduce over
replicas themselves, such as ``BatchNorm(axis_name=replicax.REPLICA_AXIS)``."""


def logical_axes(count: int) -> dict[str, int]:
    """The mesh axes for ``count`` logical devices of a replica, and their sizes: the prime factors.

    So any split of the logical devices over the dims of an array assigns whole axes.

    >>> logical_axes(12)
    {'logical0': 2, 'logical1': 2, 'logical2': 3}
    """
    factors = []
    divisor = 2
    while count > 1:
        while count % divisor == 0:
            factors.append(divisor)
            count //= divisor
        divisor += 1
    return {f"logical{i}": factor for i, factor in enumerate(factors)}


# Cached, as JAX analyses a sharding at its first use, and stores the result in it. Each call of a program also takes
# less time if arrays that are laid out in the same way have one object as their sharding.
@functools.lru_cache(maxsize=256)
def sharding_on(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """The sharding by ``spec``: the same object in each call."""
    return NamedSharding(mesh, spec)


@functools.lru_cache(maxsize=64)
def mirrored_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a value that all replicas have, whole on every device."""
    return sharding_on(mesh, PartitionSpec())


@functools.lru_cache(maxsize=64)
def per_replica_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of ``[num_replicas, …]``, of which each replica has its slice."""
    return sharding_on(mesh, PartitionSpec(REPLICA_AXIS))


_hosts_of_slice: dict[str, int] = {}


def is_here(device: jax.Device) -> bool:
    """Return whether a device is one of this worker's."""
    return bool(device.process_index == jax.process_index())


def axis_sizes(mesh: Mesh) -> dict[str, int]:
    """How many devices lie along each axis, by its name."""
    return {str(name): int(size) for name, size in mesh.shape.items()}


def describe_slices(device_kind: str, hosts: int) -> None:
    """Set how many hosts a slice of described devices of this kind has; such devices all claim to be of slice 0."""
    _hosts_of_slice[device_kind] = hosts


def slice_of(device: Any) -> int:
    """The number of a JAX device's slice; 0 if the device does not know it, as where there is only one."""
    hosts = _hosts_of_slice.get(device.device_kind)
    if hosts is not None and _jax.is_absent(device):
        return int(device.process_index) // hosts
    return getattr(device, "slice_index", None) or 0


def slices_of(devices: np.ndarray) -> int:
    """The number of slices of the devices: links inside a slice are faster than those between slices."""
    return len({slice_of(d) for d in devices.flat})


def programs_for(devices: np.ndarray) -> int:
    """The number of programs that a compiler makes of one for these devices: for TPUs one for each slice."""
    return slices_of(devices) if devices.flat[0].platform == "tpu" else 1


def slices_in_turn(devices: np.ndarray) -> int:
    """The number of slices of the replicas if each slice's are consecutive and all have as many; otherwise 0."""
    numbers = [slice_of(device) for device in devices[:, 0]]
    count = len(set(numbers))
    size, rest = divmod(len(numbers), count)
    alike = not rest and all(len(set(numbers[i : i + size])) == 1 for i in range(0, len(numbers), size))
    return count if alike else 0


def in_groups(mesh: Mesh, groups: int) -> Mesh:
    """The same devices with a new first axis: ``groups`` of neighbouring replicas; ``replica`` is then in a group."""
    if groups == 1:
        return mesh
    sizes = (groups, mesh.shape[REPLICA_AXIS] // groups, *mesh.devices.shape[1:])
    axes = ("group", *mesh.axis_names)
    return Mesh(mesh.devices.reshape(sizes), axes, axis_types=(AxisType.Auto,) * len(axes))


def in_logical_mesh() -> bool:
    """Whether the present trace is for replicas with several logical devices."""
    return AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types


def logical_device_mesh(mesh: Mesh, logical_device: int) -> Mesh:
    """The submesh of one logical device of each replica."""
    return replica_mesh(mesh.devices.reshape(mesh.shape[REPLICA_AXIS], -1)[:, logical_device])


def devices_of(mesh: Mesh, replica: int) -> Mesh:
    """The submesh of the logical devices of one replica."""
    axes = mesh.axis_names[1:]
    return Mesh(mesh.devices[replica], axes, axis_types=(AxisType.Auto,) * len(axes))


def replica_mesh(devices: Sequence[jax.Device] | np.ndarray) -> Mesh:
    """A mesh with a replica along its first axis for each entry, or row of logical devices, of ``devices``.

    If a replica has only one there is no axis for them: JAX refuses host callbacks while some axis is automatic.
    """
    array = np.array(devices, dtype=object)
    axes = {REPLICA_AXIS: array.shape[0], **logical_axes(array.size // array.shape[0])}
    return Mesh(array.reshape(tuple(axes.values())), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
