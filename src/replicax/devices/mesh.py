"""The device mesh: replicas along one axis, and the logical devices of a replica along others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from replicax import _jax

REPLICA_AXIS = "replica"
"""The mesh axis along which replicas lie: the axis name for ``jax.lax`` collectives in a step, and for layers that
reduce over replicas by themselves, such as ``BatchNorm(axis_name=replicax.REPLICA_AXIS)``."""


def logical_axes(count: int) -> dict[str, int]:
    """The mesh axes along which ``count`` logical devices of a replica lie, and their sizes: the prime factors.

    So any way to divide the logical devices over the dims of an array is a way to share out whole axes.

    >>> from replicax.devices.mesh import logical_axes
    >>> logical_axes(12)
    {'logical0': 2, 'logical1': 2, 'logical2': 3}
    >>> logical_axes(1)
    {}
    """
    factors = []
    divisor = 2
    while count > 1:
        while count % divisor == 0:
            factors.append(divisor)
            count //= divisor
        divisor += 1
    return {f"logical{i}": factor for i, factor in enumerate(factors)}


_hosts_of_slice: dict[str, int] = {}


def describe_slices(device_kind: str, hosts: int) -> None:
    """Say how many hosts a slice has of described devices of that kind, which say that they are all of slice 0."""
    _hosts_of_slice[device_kind] = hosts


def slice_of(device: Any) -> int:
    """The number of the slice that a JAX device is of; 0 where it does not say, as where there is only one."""
    hosts = _hosts_of_slice.get(device.device_kind)
    if hosts is not None and _jax.is_absent(device):
        return int(device.process_index) // hosts
    return getattr(device, "slice_index", None) or 0


def slices_of(devices: np.ndarray) -> int:
    """How many slices the devices are of: a slice's devices are linked with each other more closely than with others.

    >>> import jax, numpy as np
    >>> from replicax.devices.mesh import slices_of
    >>> slices_of(np.array(jax.devices()))
    1
    """
    return len({slice_of(d) for d in devices.flat})


def programs_for(devices: np.ndarray) -> int:
    """How many programs a compiler makes of one that runs on these devices: for TPUs one for each slice.

    >>> import jax, numpy as np
    >>> from replicax.devices.mesh import programs_for
    >>> programs_for(np.array(jax.devices()))
    1
    """
    return slices_of(devices) if devices.flat[0].platform == "tpu" else 1


def slices_in_turn(devices: np.ndarray) -> int:
    """How many slices the replicas are of, if these lie one after the other, with as many in each; 0 if they don't.

    Args:
      devices: the devices of each replica.

    >>> import jax, numpy as np
    >>> from replicax.devices.mesh import slices_in_turn
    >>> slices_in_turn(np.array(jax.devices()).reshape(-1, 1))
    1
    """
    numbers = [slice_of(device) for device in devices[:, 0]]
    count = len(set(numbers))
    size, rest = divmod(len(numbers), count)
    alike = not rest and all(len(set(numbers[i : i + size])) == 1 for i in range(0, len(numbers), size))
    return count if alike else 0


def in_groups(mesh: Mesh, groups: int) -> Mesh:
    """The same devices with a further axis in front: ``groups`` of neighbouring replicas; ``replica`` is in a group.

    >>> import jax
    >>> from replicax.devices.mesh import in_groups, replica_mesh
    >>> dict(in_groups(replica_mesh(jax.devices()[:6]), 3).shape)
    {'group': 3, 'replica': 2}
    """
    if groups == 1:
        return mesh
    sizes = (groups, mesh.shape[REPLICA_AXIS] // groups, *mesh.devices.shape[1:])
    axes = ("group", *mesh.axis_names)
    return Mesh(mesh.devices.reshape(sizes), axes, axis_types=(AxisType.Auto,) * len(axes))


def in_logical_mesh() -> bool:
    """Whether what is traced now is for replicas with several logical devices.

    >>> from replicax.devices.mesh import in_logical_mesh
    >>> in_logical_mesh()
    False
    """
    return AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types


def logical_device_mesh(mesh: Mesh, logical_device: int) -> Mesh:
    """The part of a mesh that one logical device of each replica makes up."""
    return replica_mesh(mesh.devices.reshape(mesh.shape[REPLICA_AXIS], -1)[:, logical_device])


def devices_of(mesh: Mesh, replica: int) -> Mesh:
    """The part of a mesh that the logical devices of one replica make up."""
    axes = mesh.axis_names[1:]
    return Mesh(mesh.devices[replica], axes, axis_types=(AxisType.Auto,) * len(axes))


def replica_mesh(devices: Sequence[jax.Device] | np.ndarray) -> Mesh:
    """A mesh with a replica along its first axis for each entry, or row, of ``devices``.

    There is no axis for logical devices when a replica has only one: JAX refuses host callbacks while some
    axis of the mesh is partitioned automatically.

    Args:
      devices: one for each replica, or an array ``[replicas, logical devices]``.
    """
    array = np.array(devices, dtype=object)
    axes = {REPLICA_AXIS: array.shape[0], **logical_axes(array.size // array.shape[0])}
    return Mesh(array.reshape(tuple(axes.values())), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
