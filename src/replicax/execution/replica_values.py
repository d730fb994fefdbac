"""Putting one component for each replica on the replicas' devices."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.devices.arrays import put
from replicax.devices.host_values import Where, as_array, is_key
from replicax.devices.mesh import REPLICA_AXIS
from replicax.nests import known
from replicax.values import Components, ExampleMask, PerReplica, Stacked, Uneven

ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
"""What counts as an array, or converts to one."""


Kind = tuple[str, tuple[int, ...]] | None
"""The dtype's name and shape of a component; ``None`` if it is no array."""


def kind_of_component(component: Any, where: Where = "a component of a PerReplica") -> Kind:
    """What decides whether a component, in messages called ``where``, can be stacked with others."""
    if not isinstance(component, ARRAYS):
        return None
    if not isinstance(component, jax.Array):
        component = as_array(component, where)
    return str(component.dtype), component.shape


@functools.cache
def devices_here(mesh: Mesh) -> dict[int, jax.Device]:
    """This worker's replicas in their order, each with its device."""
    first = mesh.devices.reshape(mesh.shape[REPLICA_AXIS], -1)[:, 0]
    return {i: d for i, d in enumerate(first) if d.process_index == d.client.process_index()}


def place_components(components: Sequence[Any], mesh: Mesh, kinds: Sequence[Kind] | None = None) -> PerReplica:
    """Put each component on its replica's device; as one array, if they have one dtype and rank.

    Args:
      components: those of this worker's replicas.
      mesh: the replicas' devices.
      kinds: of the components of all workers' replicas, in their order; ``None`` if there are no others.
    """
    devices = devices_here(mesh)
    kinds = [kind_of_component(c) for c in components] if kinds is None else kinds
    arrays = [
        jax.device_put(as_array(c, "a component of a PerReplica"), d) if isinstance(c, ARRAYS) else c
        for c, d in zip(components, devices.values(), strict=True)
    ]
    if None in kinds:
        arrays = list(components)
    elif len(set(kinds)) == 1:
        return PerReplica(Stacked(stack(arrays, mesh)))
    elif len({(kind[0], len(kind[1])) for kind in kinds if kind}) == 1 and not is_key(arrays[0].dtype):
        shapes = tuple(kind[1] for kind in kinds if kind)
        largest = largest_of(shapes)
        filled = [jnp.pad(a, [(0, n - m) for n, m in zip(largest, a.shape, strict=True)]) for a in arrays]
        return PerReplica(Uneven(stack(filled, mesh), shapes))
    return PerReplica(Components(tuple(arrays), tuple(devices), mesh.shape[REPLICA_AXIS]))


def largest_of(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape in which each of these shapes of one rank has room."""
    return tuple(map(max, zip(*shapes, strict=True)))


def stack(arrays: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    """``[num_replicas, *shape]`` from one array on the first device of each of this worker's replicas."""
    shape = (mesh.shape[REPLICA_AXIS], *arrays[0].shape)
    return _on_logical_devices([a[None] for a in arrays], shape, PartitionSpec(REPLICA_AXIS), mesh)


def mirror(arrays: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    """One replicated array from an equal one on the first device of each of this worker's replicas."""
    return _on_logical_devices(arrays, arrays[0].shape, PartitionSpec(), mesh)


@functools.lru_cache(maxsize=64)
def example_mask(sizes: tuple[int, ...], rows: int, mesh: Mesh) -> ExampleMask:
    """The mask of a batch of which each replica has so many examples, and then padding.

    The same object for the same sizes, so that its arrays are put on the devices once.

    Args:
      sizes: how many examples each replica has, of all workers.
      rows: how many rows each has, padding included.
      mesh: the replicas' devices.

    >>> import replicax
    >>> from replicax.execution.replica_values import example_mask
    >>> mesh = replicax.MirroredStrategy(["cpu:0", "cpu:1"]).extended.mesh
    >>> example_mask((3, 1), 3, mesh).host.tolist()
    [[True, True, True], [True, False, False]]
    """
    host = np.arange(rows)[None] < np.array(sizes, np.int64)[:, None]
    host.flags.writeable = False
    array = put(host, NamedSharding(mesh, PartitionSpec(REPLICA_AXIS)))
    count = put(np.int32(host.sum()), NamedSharding(mesh, PartitionSpec()))
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
    >>> from replicax.execution.replica_values import example_mask, padded
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


def _on_logical_devices(
    arrays: Sequence[jax.Array], shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh
) -> jax.Array:
    """One array over ``mesh``, of which all logical devices of a replica have what its first one has."""
    devices = mesh.devices.reshape(mesh.shape[REPLICA_AXIS], -1)
    pieces = [
        jax.device_put(array, device)  # which stays there, if it is there
        for array, replica in zip(arrays, devices_here(mesh), strict=True)
        for device in devices[replica]
        if device.process_index == device.client.process_index()
    ]
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), pieces)
