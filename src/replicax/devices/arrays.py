"""Puts values on devices, some of which may belong to other workers.

JAX puts a value on another process' devices only after all processes have compared it, at every call. Here each worker
puts only what its own devices need, and callers check that the workers agree where they may not.

If devices are absent (plan mode), nothing is computed or allocated: a ``jax.ShapeDtypeStruct`` with a sharding
stands for an array, and JAX compiles programs with it. Slots, layouts and programs don't see the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from replicax import _jax
from replicax.devices.host_values import Where, as_array, check_integers, check_numbers, own_copy
from replicax.devices.mesh import devices_of, mirrored_sharding


def put(
    value: Any, sharding: Sharding, *, may_alias: bool | None = None, where: Where = "a value for devices"
) -> jax.Array:
    """``value`` as an array with ``sharding``.

    ``value`` is an array or number of this worker, the same on all workers, or an array that lies on several workers
    already. ``may_alias`` says whether the result may share its memory; ``None``: if it is there already. A NumPy array
    is copied unless ``may_alias`` is true, for the caller's own copy (:func:`~replicax.devices.host_values.own_copy`).
    Messages call the value ``where``. No collective, unless ``value`` lies on several workers, and not wholly on each.
    """
    if _are_absent(sharding):
        described: Any = jax.ShapeDtypeStruct(np.shape(value), jax.dtypes.result_type(value), sharding=sharding)
        return described
    is_array = isinstance(value, jax.Array)
    if not is_array:
        check_integers(value, where)
        check_numbers(value, where)
        if isinstance(value, np.ndarray) and not may_alias:
            value = own_copy(value)
    if is_array and not value.is_fully_addressable:
        if value.sharding == sharding:
            return copied(value) if may_alias is False else value
        if not value.is_fully_replicated:
            return jax.device_put(value, sharding)
        value = value.addressable_data(0)
    if may_alias is False and _would_share(value, sharding):
        value = copied(value)
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding, may_alias=may_alias)
    if not is_array:
        value = value if isinstance(value, np.ndarray) else as_array(value, where)
    places = sharding.addressable_devices_indices_map(value.shape)
    pieces = [jax.device_put(_part(value, index), device, may_alias=may_alias) for device, index in places.items()]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, pieces)


def put_copies(values: Sequence[Any], shardings: Sequence[Sharding]) -> list[jax.Array]:
    """Put several values of this worker at once, as :func:`put` does with ``may_alias=False``.

    No other code holds the NumPy arrays among them.
    """
    unshared = list(values)
    shared = [i for i, (v, s) in enumerate(zip(values, shardings, strict=True)) if _would_share(v, s)]
    if shared:
        copies = _jax.copies([values[i] for i in shared], [values[i].sharding for i in shared])
        for i, copy in zip(shared, copies, strict=True):
            unshared[i] = copy
    return _jax.copies(unshared, shardings)


def _would_share(value: Any, sharding: Sharding) -> bool:
    """Whether JAX would reuse a part of an array although it was asked not to, as it does when it adds copies.

    A program that takes the memory of one array as a donation would then take that of the other.
    """
    if not isinstance(value, jax.Array) or value.sharding == sharding:
        return False
    present, wanted = value.sharding.device_set, sharding.device_set
    return not present.isdisjoint(wanted) and len(present) + len(wanted) > 2


@_jax.compiling()
def compute(fn: Callable[..., Any], operands: Sequence[Any], shardings: Any) -> Any:
    """Compile and run ``fn(*operands)``, with its results laid out by ``shardings``, a pytree like the results."""
    if _are_absent(shardings):
        shapes = jax.eval_shape(fn, *operands)
        return jax.tree_util.tree_map(lambda leaf, sharding: leaf.update(sharding=sharding), shapes, shardings)
    return jax.jit(fn, out_shardings=shardings)(*operands)


def _are_absent(shardings: Any) -> bool:
    leaves: list[Sharding] = jax.tree_util.tree_leaves(shardings)
    return bool(leaves) and _jax.is_absent(next(iter(leaves[0].device_set)))


def same_memory(array: jax.Array, shape: tuple[int, ...], sharding: Sharding) -> jax.Array:
    """Another array in the memory of ``array``: each device's part has the same elements in the same order."""
    if array.shape == shape and array.sharding == sharding:
        return array
    if _are_absent(sharding):
        described: Any = jax.ShapeDtypeStruct(shape, array.dtype, sharding=sharding)
        return described
    return jax.make_array_from_single_device_arrays(shape, sharding, [s.data for s in array.addressable_shards])


def put_among(value: Any, sharding: Sharding) -> jax.Array:
    """``value`` as an array with ``sharding``: without a copy, if its devices are among those that have it already."""
    if not isinstance(value, jax.Array) or value.sharding == sharding:
        return put(value, sharding)
    wanted = sharding.addressable_devices_indices_map(value.shape)
    present = value.sharding.addressable_devices_indices_map(value.shape)
    if any(device not in present or present[device] != index for device, index in wanted.items()):
        return put(value, sharding)
    shards = {shard.device: shard.data for shard in value.addressable_shards}
    return jax.make_array_from_single_device_arrays(value.shape, sharding, [shards[device] for device in wanted])


def _part(value: Any, index: tuple[slice, ...] | None) -> Any:
    return value if index is None or all(i == slice(None) for i in index) else value[index]


def local_array(value: jax.Array) -> jax.Array:
    """This worker's copy of an array that every replica has in whole, on the devices of one of its replicas."""
    if value.is_fully_addressable:
        return value
    if value.is_fully_replicated:
        return value.addressable_data(0)
    over_mesh: Any = value.sharding
    owners = [row.flat[0].process_index for row in over_mesh.mesh.devices]
    mine = owners.index(value.addressable_shards[0].device.process_index)
    return put_among(value, NamedSharding(devices_of(over_mesh.mesh, mine), over_mesh.spec))


def is_in_parts(value: Any) -> bool:
    """Whether a value is an array that lies in parts on several workers, of which none can read it by itself."""
    return isinstance(value, jax.Array) and not (value.is_fully_addressable or value.is_fully_replicated)


@jax.disable_jit(False)
def gathered(value: jax.Array) -> jax.Array:
    """An array as each worker can read it: with a collective if it lies in parts on several, which all call this."""
    if not is_in_parts(value):
        return value
    over_mesh: Any = value.sharding
    return jax.jit(lambda x: x, out_shardings=mirrored_sharding(over_mesh.mesh))(value)


def copied(value: jax.Array) -> jax.Array:
    """A copy in other memory. Each worker copies its part, without a compiled program."""
    if value.is_fully_addressable:
        return jax.device_put(value, value.sharding, may_alias=False)
    pieces = [jax.device_put(shard.data, shard.device, may_alias=False) for shard in value.addressable_shards]
    return jax.make_array_from_single_device_arrays(value.shape, value.sharding, pieces)
