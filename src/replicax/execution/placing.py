"""Putting one component for each replica on the replicas' devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.topology.mesh import REPLICA_AXIS
from replicax.values import Components, PerReplica, Stacked

ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
"""What counts as an array, or converts to one."""


def place_components(components: Sequence[Any], mesh: Mesh) -> PerReplica:
    """Put each component on its replica's devices; as one stacked array, if they have one shape and dtype."""
    if not all(isinstance(c, ARRAYS) for c in components):
        return PerReplica(Components(tuple(components)))
    devices = _by_replica(mesh)
    arrays = [jax.device_put(jnp.asarray(c), mine[0]) for c, mine in zip(components, devices, strict=True)]
    if len({(a.shape, a.dtype) for a in arrays}) > 1:
        return PerReplica(Components(tuple(arrays)))
    return PerReplica(Stacked(stack(arrays, mesh)))


def stack(arrays: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    """``[num_replicas, *shape]`` from one array on each replica's first device, each of which stays there."""
    rows = [a[None] for a in arrays]
    return _on_logical_devices(rows, (len(rows), *arrays[0].shape), PartitionSpec(REPLICA_AXIS), mesh)


def mirror(arrays: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    """One replicated array from an equal one on each replica's first device."""
    return _on_logical_devices(arrays, arrays[0].shape, PartitionSpec(), mesh)


def _on_logical_devices(
    arrays: Sequence[jax.Array], shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh
) -> jax.Array:
    """One array over ``mesh``, of which all logical devices of a replica have what its first one has."""
    pieces = [jax.device_put(a, d) for a, mine in zip(arrays, _by_replica(mesh), strict=True) for d in mine]
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), pieces)


def _by_replica(mesh: Mesh) -> list[list[jax.Device]]:
    """The logical devices of each replica."""
    devices: list[list[jax.Device]] = mesh.devices.reshape(mesh.shape[REPLICA_AXIS], -1).tolist()
    return devices
