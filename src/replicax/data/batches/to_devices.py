"""Puts elements of the host on the devices of the replicas."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from replicax import _jax
from replicax.devices.arrays import put
from replicax.devices.mesh import mirrored_sharding, per_replica_sharding
from replicax.execution.many_steps.element_groups import ElementGroup
from replicax.execution.replica_values import example_mask, largest_of
from replicax.values import PerReplica, Ragged, Stacked, padded, rebuilt
from replicax.workers.replicas import Replicas

if TYPE_CHECKING:
    from replicax.data.batches.local_batches import BatchGroup, HostBatch


def placer(replicas: Replicas) -> Callable[[HostBatch | BatchGroup], Any]:
    """A function that puts elements on the devices of ``replicas``, on any thread, under this thread's JAX settings."""
    from replicax.data.batches.local_batches import HostBatch  # it needs Grain

    adopt = _jax.settings_of_this_thread()
    here = threading.local()  # the ids of threads are reused
    here.adopted = True

    def place(element: HostBatch | BatchGroup) -> Any:
        if not hasattr(here, "adopted"):
            adopt()
            here.adopted = True
        return placed(element, replicas) if isinstance(element, HostBatch) else _placed_group(element, replicas)

    return place


def placed(element: HostBatch, replicas: Replicas) -> Any:
    """The pytree with ``PerReplica`` leaves; with one replica bare arrays, unless they are padded."""
    leaves: list[Any] = []
    if element.filled:
        mask = example_mask(element.sizes, element.filled[0].shape[1], replicas.mesh)
        leaves = padded(_place_stacks(element.filled, replicas), mask)
    elif element.kinds is None and len(set(element.sizes)) == 1:  # all replicas have the same shapes
        bare = replicas.num_replicas == 1
        arrays = _place_stacks(_stacks(element), replicas, bare)
        leaves = arrays if bare else [PerReplica(Stacked(array)) for array in arrays]
    else:
        shapes = element.shapes
        stacks = [_with_room(column, largest_of(s)) for column, s in zip(element.columns, shapes, strict=True)]
        for array, each in zip(_place_stacks(stacks, replicas), shapes, strict=True):
            leaves.append(PerReplica(Ragged(array, each) if len(set(each)) > 1 else Stacked(array)))
    return rebuilt(element.tree, leaves)


def _placed_group(group: BatchGroup, replicas: Replicas) -> ElementGroup:
    mesh, bare = replicas.mesh, replicas.num_replicas == 1 and not group.is_padded
    stacks = group.stacks()
    arrays = _place_stacks(stacks, replicas, bare)
    if group.is_padded:
        rows, sizes = stacks[0].shape[2], np.array(group.sizes)
        host = np.arange(rows) < sizes.T[:, :, None]
        arrays.append(put(host, per_replica_sharding(mesh)))
        arrays.append(put(sizes.sum(1).astype(np.int32), mirrored_sharding(mesh)))
    sizes_of = tuple(group.sizes) if group.is_padded else None
    return ElementGroup(group.tree, arrays, len(group.sizes), mesh, bare, sizes_of)


def _place_stacks(stacks: Sequence[np.ndarray], replicas: Replicas, bare: bool = False) -> list[jax.Array]:
    """Arrays ``[this worker's replicas, …]`` as arrays ``[num_replicas, …]``, with a slice on each replica's device."""
    mesh = replicas.mesh
    if bare:
        bares, where = [s[0] for s in stacks], mirrored_sharding(mesh)
        alone = _jax.put_alone(bares, where) if mesh.size == 1 else None
        return jax.device_put(bares, where) if alone is None else alone
    sharding = per_replica_sharding(mesh)
    if sharding.is_fully_addressable:
        return jax.device_put(list(stacks), sharding)
    return [jax.make_array_from_process_local_data(sharding, s, (replicas.num_replicas, *s.shape[1:])) for s in stacks]


def _stacks(element: HostBatch) -> list[Any]:
    """Return, for each leaf, an array ``[len(parts), rows, …]``.

    A copy, if the dataset may fill the same buffer again: this element may still be on its way to the devices, and on
    a CPU a device's array may be that very buffer.
    """
    if element.joined is not None:
        count = len(element.parts)
        return [leaf.reshape(count, len(leaf) // count, *leaf.shape[1:]) for leaf in element.joined.leaves]
    return [
        (jax.numpy if any(isinstance(leaf, jax.Array) for leaf in column) else np).stack(column)
        for column in zip(*(part.leaves for part in element.parts), strict=True)
    ]


def _with_room(parts: tuple[Any, ...], largest: tuple[int, ...]) -> np.ndarray:
    """An array ``[len(parts), *largest]``, with each part at the start of its slice."""
    stack = np.zeros((len(parts), *largest), parts[0].dtype)
    for i, part in enumerate(parts):
        start: tuple[Any, ...] = (i, *map(slice, part.shape))
        stack[start] = part
    return stack
