"""Putting one component for each replica on the replicas' devices."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from replicax.devices.arrays import put
from replicax.devices.host_values import as_array, is_key
from replicax.devices.mesh import mirrored_sharding, per_replica_sharding
from replicax.errors import ContextError
from replicax.values import Components, ExampleMask, PerReplica, Ragged, Stacked
from replicax.workers.replicas import Replicas

ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
"""The types of arrays, and of values that convert to one."""


ComponentType = tuple[str, tuple[int, ...]] | None
"""The dtype's name and shape of a component; ``None`` if it is no array."""


def type_of_component(component: Any, where: str) -> ComponentType:
    """The dtype and shape of a component, by which it can be stacked with others; ``where`` is its name in messages."""
    if not isinstance(component, ARRAYS):
        return None
    if not isinstance(component, jax.Array):
        component = as_array(component, where)
    if isinstance(component, jax.core.Tracer):
        raise ContextError(f"{where} is being traced: call it outside jax.jit, jax.grad, steps and the like")
    return str(component.dtype), component.shape


def place_components(components: Sequence[Any], replicas: Replicas, types: Sequence[ComponentType]) -> PerReplica:
    """Put each of this worker's components on its replica's device; as one array, if they have one dtype and rank.

    ``types`` are those of the components of all workers' replicas, in their order.
    """
    if None in types:
        return PerReplica(Components(tuple(components), replicas.local_replicas, replicas.num_replicas))
    shapes = tuple(shape for _, shape in filter(None, types))
    made = (as_array(c, "a component of a PerReplica") for c in components)  # each makes room for the next
    if len(set(types)) == 1 and replicas.per_device == 1:
        return PerReplica(Stacked(stack(made, shapes[0], replicas)))  # which puts them on the devices
    arrays = [jax.device_put(a, d) for a, d in zip(made, replicas.local_devices.values(), strict=True)]
    if len(set(types)) == 1:
        return PerReplica(Stacked(stack(arrays, shapes[0], replicas)))
    if len({(dtype, len(shape)) for dtype, shape in filter(None, types)}) == 1 and not is_key(arrays[0].dtype):
        largest = largest_of(shapes)
        filled = [jnp.pad(a, [(0, n - m) for n, m in zip(largest, a.shape, strict=True)]) for a in arrays]
        return PerReplica(Ragged(stack(filled, largest, replicas), shapes))
    return PerReplica(Components(tuple(arrays), replicas.local_replicas, replicas.num_replicas))


def largest_of(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape in which each of these shapes of one rank has room."""
    return tuple(map(max, zip(*shapes, strict=True)))


def stack(arrays: Iterable[jax.Array], shape: tuple[int, ...], replicas: Replicas) -> jax.Array:
    """``[num_replicas, *shape]`` from one array of each of this worker's replicas; those of a device lie there."""
    each, k = iter(arrays), replicas.per_device
    slices = (a[None] if k == 1 else jnp.stack([a, *itertools.islice(each, k - 1)]) for a in each)
    return _on_logical_devices(slices, (replicas.num_replicas, *shape), per_replica_sharding(replicas.mesh), replicas)


def mirror(arrays: Sequence[jax.Array], replicas: Replicas) -> jax.Array:
    """One replicated array from an equal one on the first device of each of this worker's replicas."""
    sharding = mirrored_sharding(replicas.mesh)
    return _on_logical_devices(arrays[:: replicas.per_device], arrays[0].shape, sharding, replicas)


@functools.lru_cache(maxsize=64)
def example_mask(sizes: tuple[int, ...], rows: int, mesh: Mesh) -> ExampleMask:
    """The mask of a batch of which each replica, of all workers, has so many examples, and then padding.

    The same object for the same sizes, so that its arrays are put on the devices once.
    """
    host = np.arange(rows)[None] < np.array(sizes, np.int64)[:, None]
    host.flags.writeable = False
    array = put(host, per_replica_sharding(mesh))
    count = put(np.int32(host.sum()), mirrored_sharding(mesh))
    return ExampleMask(array, count, host)


def cant_be_told(what: str, dim: int, shape: tuple[int, ...]) -> ValueError:
    """The error that padding can't be told from examples."""
    return ValueError(
        f"{what} along dim {dim} of a value of shape {shape} on each replica, computed from a padded batch: its rows "
        "may be padding, and which can't be told after the operations that made it. Reduce inside the step, with "
        "replicax.get_replica_context().example_mask; return it with the examples along a dim of their own; or use "
        'InputOptions(partial_batch="exact"), which does not pad.'
    )


def _on_logical_devices(
    arrays: Iterable[jax.Array], shape: tuple[int, ...], sharding: NamedSharding, replicas: Replicas
) -> jax.Array:
    """One array over all devices: the array of a replica's first logical device is on all of them."""
    pieces = [
        jax.device_put(array, device)  # which stays there, if it is there
        for array, replica in zip(arrays, replicas.local_replicas[:: replicas.per_device], strict=True)
        for device in replicas.logical_devices[replica]
        if device.process_index == device.client.process_index()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)
