"""Arrays in checkpoints: what is saved for each kind of array, and how its value is restored.

A variable's stored array has one block for each device, and a block that several devices have is saved once. Blocks are
described by the indices of the variable's *value*, not by its layout, so a checkpoint fits any layout.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from replicax.checkpoint.device_blocks import (
    HostArray,
    Part,
    Read,
    assembled,
    device_blocks,
    is_large,
    parts_of,
)
from replicax.checkpoint.storage.blocks import (
    Block,
    common,
    inside,
    shape_of,
    size_of,
    whole_block,
)
from replicax.checkpoint.storage.index import ArrayKind
from replicax.devices.arrays import compute, put
from replicax.devices.host_values import is_key
from replicax.devices.mesh import is_here
from replicax.variables import Aggregation, Variable
from replicax.variables.layout import Split
from replicax.variables.lost_arrays import LostArray
from replicax.variables.slots import store_each


class ArrayLeaf(abc.ABC):
    """An array in a checkpoint.

    The methods are those for an array that all workers have as a whole; subclasses for others replace them.
    """

    kind: ArrayKind  # must be the same when the array is restored
    owner: Any  # the object that has the array: one with two names is written once
    # Whether :meth:`here` returns memory that others change: that of a CPU device, which the next step takes over, or
    # of the user's array. Other devices send their data to new memory.
    is_on_host = True
    workers: int

    def parts(self) -> tuple[Part, ...]:
        """All blocks, each once; unchanged as long as the array keeps its layout."""
        return (Part(whole_block(self.kind.shape), tuple(range(self.workers))),)

    @abc.abstractmethod
    def here(self) -> Sequence[Any]:
        """Return this worker's parts, by their positions: arrays of one device, or of the host."""

    def needed(self) -> list[Block]:
        """The blocks that :meth:`restored` reads on this worker."""
        return [whole_block(self.kind.shape)]

    @abc.abstractmethod
    def restored(self, read: Read) -> Any:
        """Restore the saved value; returns the object that has it."""


class VariableLeaf(ArrayLeaf):
    """A variable with the same value on all replicas, whole or in parts.

    If it is whole, and its devices belong to one worker only, as of one made outside every scope, all workers must have
    the same value.
    """

    def __init__(self, variable: Variable, workers: int) -> None:
        self.owner = self.variable = variable
        self.kind = kind_of_array(variable)
        self.workers = workers
        self._arrays_of = _arrays_here(variable.sharding, self.kind)
        self.is_on_host = _is_on_cpu(variable.sharding)

    def parts(self) -> tuple[Part, ...]:
        sharding, shape = self._laid_out()
        if self.workers > 1 and sharding.is_fully_addressable and sharding.is_fully_replicated:
            return super().parts()
        return parts_of(self._places(), sharding, shape, shape != self.variable.shape)

    def here(self) -> Sequence[Any]:
        array = self.variable.slot.array
        return self._arrays_of(self.variable.stored() if type(array) is LostArray else array)

    def needed(self) -> list[Block]:
        return _blocks_here(self._places(), self.kind)

    def restored(self, read: Read) -> Variable:
        variable = self.variable
        if self.kind.generator is not None:  # keys are small, and never split
            key = _as_keys(read(whole_block(self.kind.shape)), self.kind)
            store_each({variable.slot: variable.to_storage(key)})
            return variable
        sharding, shape = self._laid_out()
        if any(is_large(block, variable.dtype) for block, _ in device_blocks(sharding, shape)):
            # Two copies may exceed the memory.
            store_each({variable.slot: LostArray("it was let go to be restored, and the restore was broken off")})
        laid_out = assembled(sharding, shape, variable.dtype, lambda block: _filled_block(block, self.kind, read))
        store_each({variable.slot: variable.layout.to_stored(laid_out, variable.replicas.mesh)})
        return variable

    def _laid_out(self) -> tuple[Sharding, tuple[int, ...]]:
        """The sharding of the stored array, restricted to one copy of the value, and its shape."""
        layout = self.variable.layout
        return layout.laid_out_sharding(self.variable.replicas.mesh), layout.laid_out_shape(self.variable.shape)

    def _places(self) -> tuple[tuple[Block, tuple[jax.Device, ...]], ...]:
        """The blocks of the value, without padding, and the devices of each."""
        variable = self.variable
        places = device_blocks(*self._laid_out())
        if self.kind.generator is not None:
            return tuple((_with_data_dims(block, self.kind), devices) for block, devices in places)
        if not isinstance(variable.layout, Split) or not variable.layout.filling:
            return places
        value = whole_block(variable.shape)
        clipped = ((common(block, value), devices) for block, devices in places)
        return tuple((block, devices) for block, devices in clipped if block is not None)


class CopiesLeaf(ArrayLeaf):
    """An on-read variable: a copy on each replica.

    With an aggregation, its value is that of a read outside a step, and restoring divides it among the copies. If no
    value of its dtype stands for all copies (:func:`keeps_each_copy`), each is saved. The copies of all workers are
    gathered before they are written: usually they are small, so each worker's disk gets all of them.
    """

    def __init__(self, variable: Variable) -> None:
        self.owner = self.variable = variable
        self.workers = variable.replicas.lockstep.workers.count
        self._count = variable.replicas.num_replicas
        kind = kind_of_array(variable)
        if keeps_each_copy(variable):
            kind = dataclasses.replace(kind, shape=(self._count, *kind.shape), copies=self._count)
        self.kind = kind

    def copies(self) -> dict[int, HostArray]:
        """This worker's copies, by replica."""
        kind = kind_of_array(self.variable)
        copies: dict[int, HostArray] = {}
        places = device_blocks(self.variable.sharding, self.variable.layout.stored_shape(self.variable.shape))
        shards = {shard.device: shard.data for shard in self.variable.stored().addressable_shards}
        for block, devices in places:
            device = next(filter(is_here, devices), None)
            if device is None:
                continue
            data = np.asarray(_without_keys(shards[device]))
            replicas, inner = ((0, 1), block) if not self.variable.is_stacked else (block[0], block[1:])
            inner = _with_data_dims(inner, kind)
            for replica in range(*replicas):
                copy = copies.setdefault(replica, np.empty(kind.shape, kind.numpy_dtype))
                row = data[replica - replicas[0]] if self.variable.is_stacked else data
                copy[inside(inner, whole_block(kind.shape))] = row
        return copies

    def combined(self, copies: dict[int, HostArray]) -> HostArray:
        """The array to save, from the copies of all replicas."""
        rows = [copies[replica] for replica in range(self._count)]
        aggregation = self.variable.aggregation
        if self.kind.copies is not None:
            return np.stack(rows)
        if aggregation is Aggregation.ONLY_FIRST_REPLICA:
            return rows[0]
        stacked = np.stack(rows)
        wide = stacked.astype(np.float32) if stacked.dtype.isbuiltin != 1 else stacked
        total = wide.sum(0, dtype=wide.dtype)
        if aggregation is Aggregation.MEAN:
            total = total / np.asarray(self._count, total.dtype)
        return np.asarray(total).astype(stacked.dtype)

    def here(self) -> Sequence[Any]:
        return ()  # the copies are combined later

    def restored(self, read: Read) -> Variable:
        variable = self.variable
        value = read(whole_block(self.kind.shape))
        if not variable.is_stacked:
            value = value[0] if self.kind.copies is not None else value
            store_each({variable.slot: variable.to_storage(_as_keys(value, self.kind))})
            return variable
        if self.kind.copies is not None:
            rows = value
        elif variable.aggregation is Aggregation.SUM:
            rows = np.stack([_share(value, replica, self._count) for replica in range(self._count)])
        else:
            rows = np.broadcast_to(value, (self._count, *value.shape))
        store_each({variable.slot: put(_as_keys(rows, self.kind), variable.sharding, may_alias=False)})
        return variable


class DeviceArrayLeaf(ArrayLeaf):
    """A JAX array, which restoring replaces by another with the same sharding.

    If its devices belong to one worker only, all workers must have the same value.
    """

    def __init__(self, array: jax.Array, workers: int) -> None:
        self.owner = self.array = array
        is_weak = getattr(array, "weak_type", None) or None  # keys have no such attribute
        self.kind = dataclasses.replace(kind_of_array(array), is_weak=is_weak)
        self.workers = workers
        self._is_everywhere = workers > 1 and array.is_fully_addressable
        self._arrays_of = _arrays_here(array.sharding, self.kind)
        self.is_on_host = _is_on_cpu(array.sharding)

    def parts(self) -> tuple[Part, ...]:
        if self._is_everywhere:
            return super().parts()
        places = [(_with_data_dims(block, self.kind), devices) for block, devices in self._places()]
        return parts_of(places, self.array.sharding, self.array.shape)

    def here(self) -> Sequence[Any]:
        if self._is_everywhere:
            return (_without_keys(self.array),)
        return self._arrays_of(self.array)

    def needed(self) -> list[Block]:
        return _blocks_here(self._places(), self.kind)

    def restored(self, read: Read) -> jax.Array:
        array = self.array
        if self.kind.generator is not None or not array.committed:
            value = _as_keys(read(whole_block(self.kind.shape)), self.kind)
            if not array.committed:  # JAX may move it
                return jnp.array(value)
            return put(value, array.sharding, may_alias=False)
        return assembled(array.sharding, array.shape, array.dtype, read)

    def _places(self) -> tuple[tuple[Block, tuple[jax.Device, ...]], ...]:
        return device_blocks(self.array.sharding, self.array.shape)


class HostArrayLeaf(ArrayLeaf):
    """A NumPy array or scalar, which restoring replaces; all workers must have the same value."""

    def __init__(self, array: HostArray | np.generic, workers: int) -> None:
        self.owner = self.array = array
        self.kind = dataclasses.replace(kind_of_array(array), is_weak=False)
        self.workers = workers

    def here(self) -> Sequence[Any]:
        return (self.array,)

    def restored(self, read: Read) -> Any:
        value = read(whole_block(self.kind.shape))
        return value[()] if isinstance(self.array, np.generic) else value


def keeps_each_copy(variable: Variable) -> bool:
    """Return whether each copy of an on-read variable is saved: without aggregation, or as bools can't hold a sum."""
    is_count = variable.aggregation is Aggregation.SUM and variable.dtype == np.bool_
    return variable.is_on_read and (is_count or variable.aggregation is Aggregation.NONE)


def kind_of_array(array: Any) -> ArrayKind:
    """The kind of an array, or of one replica's value of a variable."""
    if not is_key(array.dtype):
        return ArrayKind(tuple(array.shape), np.dtype(array.dtype).name)
    return _kind_of_keys(tuple(array.shape), array.dtype)


@functools.lru_cache(maxsize=1000)
def _kind_of_keys(shape: tuple[int, ...], dtype: Any) -> ArrayKind:
    generators = []

    def data(keys: Any) -> Any:
        generators.append(str(jax.random.key_impl(keys)))
        return jax.random.key_data(keys)

    aval = jax.eval_shape(data, jax.ShapeDtypeStruct(shape, dtype))
    return ArrayKind(aval.shape, np.dtype(aval.dtype).name, generators[0])


# --- this worker's parts --------------------------------------------------------------------------------


def _blocks_here(places: Sequence[tuple[Block, tuple[jax.Device, ...]]], kind: ArrayKind) -> list[Block]:
    """The blocks that this worker reads; for keys, which are small, the whole array."""
    if kind.generator is not None:
        return [whole_block(kind.shape)]
    return [block for block, devices in places if any(map(is_here, devices))]


def _arrays_here(sharding: Sharding, kind: ArrayKind) -> Callable[[Any], Sequence[Any]]:
    """A function from an array to this worker's single-device arrays of it; to the first if all are the same.

    On other devices than CPUs these are new arrays, because JAX keeps a host copy that was made of an array as long as
    the array lives.
    """
    if kind.generator is not None:
        return lambda keys: [_without_keys(shard.data) for shard in keys.addressable_shards]
    if sharding.is_fully_replicated:
        if len(sharding.device_set) == 1 and _is_on_cpu(sharding):
            return lambda array: (array,)
        return lambda array: (array.addressable_data(0),)
    if not _is_on_cpu(sharding):
        return lambda array: [array.addressable_data(i) for i in range(len(sharding.addressable_devices))]
    return lambda array: [shard.data for shard in array.addressable_shards]


def _is_on_cpu(sharding: Sharding) -> bool:
    devices: Iterable[Any] = sharding.device_set
    return next(iter(devices)).platform == "cpu"


def _without_keys(data: jax.Array) -> jax.Array:
    """The data of keys; other arrays unchanged."""
    return jax.random.key_data(data) if is_key(data.dtype) else data


def _with_data_dims(block: Block, kind: ArrayKind) -> Block:
    """A block of keys as a block of their data."""
    return block if kind.generator is None else (*block, *whole_block(kind.shape[len(block) :]))


# --- restoring values -----------------------------------------------------------------------------------


def _as_keys(data: HostArray, kind: ArrayKind) -> Any:
    return data if kind.generator is None else jax.random.wrap_key_data(jnp.asarray(data), impl=kind.generator)


def weakly_typed(array: jax.Array) -> jax.Array:
    """``array`` as one whose type is weak."""
    zero = np.zeros((), array.dtype).item()
    sharding = array.sharding if array.committed else None
    return compute(lambda x: jnp.full(x.shape, zero).at[...].set(x), (array,), sharding)


def _filled_block(block: Block, kind: ArrayKind, read: Read) -> HostArray:
    """A block of a stored array, padded with zeros after the end of the value."""
    real = common(block, whole_block(kind.shape))
    if real == block or not size_of(block):
        return read(block)
    filled = np.zeros(shape_of(block), kind.numpy_dtype)
    if real is not None:
        filled[inside(real, block)] = read(real)
    return filled


def _share(total: HostArray, replica: int, count: int) -> HostArray:
    """Like :func:`replicax.variables.aggregation.share_of`, on the host."""
    if jnp.issubdtype(total.dtype, jnp.inexact):
        return np.asarray(total / np.asarray(count, total.dtype)).astype(total.dtype)
    quotient, remainder = np.divmod(total, np.asarray(count, total.dtype))
    return np.asarray(quotient + remainder if replica == 0 else quotient).astype(total.dtype)
