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
    """Put each component on its replica's device; as one stacked array, if they have one shape and dtype."""
    if not all(isinstance(c, ARRAYS) for c in components):
        return PerReplica(Components(tuple(components)))
    devices = list(mesh.devices.flat)
    arrays = [jax.device_put(jnp.asarray(c), d) for c, d in zip(components, devices, strict=True)]
    if len({(a.shape, a.dtype) for a in arrays}) > 1:
        return PerReplica(Components(tuple(arrays)))
    return PerReplica(Stacked(stack(arrays, mesh)))


def stack(arrays: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    """``[num_replicas, *shape]`` from one array on each replica's device, each of which stays there."""
    sharding = NamedSharding(mesh, PartitionSpec(REPLICA_AXIS))
    rows = [a[None] for a in arrays]
    return jax.make_array_from_single_device_arrays((len(rows), *arrays[0].shape), sharding, rows)


def mirror(arrays: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    """One replicated array from an equal one on each replica's device."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_single_device_arrays(arrays[0].shape, sharding, list(arrays))
