"""Putting one component for each replica on the replicas' devices."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.nests import known
from replicax.topology.mesh import REPLICA_AXIS
from replicax.values import Components, ExampleMask, PerReplica, Stacked

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


@functools.lru_cache(maxsize=64)
def example_mask(sizes: tuple[int, ...], rows: int, mesh: Mesh) -> ExampleMask:
    """The mask of a batch of which each replica has so many examples, and then padding.

    The same object for the same sizes, so that its arrays are put on the devices once.

    Args:
      sizes: how many examples each replica has.
      rows: how many rows each has, padding included.
      mesh: the replicas' devices.

    >>> import replicax
    >>> from replicax.execution.placing import example_mask
    >>> mesh = replicax.MirroredStrategy(["cpu:0", "cpu:1"]).extended.mesh
    >>> example_mask((3, 1), 3, mesh).host.tolist()
    [[True, True, True], [True, False, False]]
    """
    host = np.arange(rows)[None] < np.array(sizes, np.int64)[:, None]
    host.flags.writeable = False
    array = jax.device_put(host, NamedSharding(mesh, PartitionSpec(REPLICA_AXIS)))
    count = jax.device_put(np.int32(host.sum()), NamedSharding(mesh, PartitionSpec()))
    return ExampleMask(array, count, host)


def padded(stacked: Any, mask: ExampleMask) -> Any:
    """An element of a dataset that pads.

    Args:
      stacked: a pytree of arrays ``[num_replicas, rows, …]`` on the replicas' devices; with one replica, too.
      mask: which rows are examples.

    Returns:
      The pytree with ``PerReplica`` leaves that share ``mask``.

    Raises:
      ValueError: an array has other replicas or rows than the mask.

    >>> import jax.numpy as jnp, replicax
    >>> from replicax.execution.placing import example_mask, padded
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> x = padded(jnp.array([[1.0, 2.0], [3.0, 0.0]]), example_mask((2, 1), 2, strategy.extended.mesh))
    >>> x
    PerReplica(float32[2], 2 replicas, 3 of 4 rows are examples)
    >>> float(strategy.reduce("mean", x, axis=0))
    2.0
    """

    def one(array: jax.Array) -> PerReplica:
        if array.shape[:2] != mask.host.shape:
            raise ValueError(f"padded: an array of shape {array.shape} does not go with a mask of {mask.host.shape}")
        return PerReplica(Stacked(array), mask)

    return jax.tree_util.tree_map(one, known(stacked))
