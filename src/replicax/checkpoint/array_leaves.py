"""Arrays that are saved and restored: what is saved of each kind of array, and how its value is put back.

A variable's stored array has one block for each device, and the same block on several devices is saved once. A block
is described in terms of the variable's *value*, not of its layout, so any layout reads what any other has written.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

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
    is_here,
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
from replicax.checkpoint.storage.checkpoint_index import ArrayKind
from replicax.devices.arrays import put
from replicax.devices.host_values import is_key
from replicax.variables import Aggregation, Variable
from replicax.variables.layout import Split
from replicax.variables.lost_arrays import LostArray
from replicax.variables.slots import escaped, exchanging


class ArrayLeaf(Protocol):
    """An array in a checkpoint.

    Attributes:
      kind: what has to be the same when it is restored.
      owner: the object that has the array: one that has two names is written once.
      is_on_host: whether what :meth:`here` returns shows memory that others change: that of a CPU device, which the
        next step takes, or of the user's own array. Other devices send what they have to new memory.
    """

    kind: ArrayKind
    owner: Any
    is_on_host: bool

    def parts(self) -> tuple[Part, ...]:
        """All blocks, each once. They are the same as long as the array has its place."""

    def here(self) -> Sequence[Any]:
        """What this worker has, by the positions of parts: arrays of one device, or of the host."""

    def check(self) -> None:
        """Raise if the array is gone; the message says why.

        Raises:
          VariableLostError: it is a variable's, and gone.
        """

    def needed(self) -> list[Block]:
        """The blocks that :meth:`restored` reads on this worker."""

    def restored(self, read: Read) -> Any:
        """Take the saved value; returns the object that has it."""


class VariableLeaf:
    """A variable of which all replicas have the same value, whole or in parts."""

    def __init__(self, variable: Variable) -> None:
        self.owner = self.variable = variable
        self.kind = kind_of_array(variable)
        self._arrays_of = _way_to_arrays(variable.sharding, self.kind)
        self.is_on_host = _is_on_cpu(variable.sharding)

    def parts(self) -> tuple[Part, ...]:
        sharding, shape = self._laid_out()
        return parts_of(self._places(), sharding, shape, shape != self.variable.shape)

    def here(self) -> Sequence[Any]:
        array = self.variable.slot.array
        if type(array) is LostArray:
            self.check()
        return self._arrays_of(array)

    def check(self) -> None:
        self.variable.stored()

    def needed(self) -> list[Block]:
        return _blocks_here(self._places(), self.kind)

    def restored(self, read: Read) -> Variable:
        variable = self.variable
        if self.kind.generator is not None:  # small, and never split
            key = _as_keys(read(whole_block(self.kind.shape)), self.kind)
            _store(variable, variable.to_storage(key))
            return variable
        sharding, shape = self._laid_out()
        places = device_blocks(sharding, shape)
        _let_go_of_large(variable, [block for block, _ in places])
        laid_out = assembled(sharding, shape, variable.dtype, lambda block: _filled(block, self.kind, read))
        _store(variable, variable.layout.to_stored(laid_out, variable.replicas.mesh))
        return variable

    def _laid_out(self) -> tuple[Sharding, tuple[int, ...]]:
        """How the value lies on the devices, seen so that it is there once, and the shape of what does."""
        layout = self.variable.layout
        return layout.laid_out_sharding(self.variable.replicas.mesh), layout.laid_out_shape(self.variable.shape)

    def _places(self) -> tuple[tuple[Block, tuple[jax.Device, ...]], ...]:
        """The blocks of the value, without what a split one is filled up with, and the devices that have them."""
        variable = self.variable
        places = device_blocks(*self._laid_out())
        if self.kind.generator is not None:
            return tuple((_with_data_dims(block, self.kind), devices) for block, devices in places)
        if not isinstance(variable.layout, Split) or not variable.layout.filling:
            return places
        value = whole_block(variable.shape)
        clipped = ((common(block, value), devices) for block, devices in places)
        return tuple((block, devices) for block, devices in clipped if block is not None)


class CopiesLeaf:
    """An on-read variable: a copy on each replica.

    With an aggregation its value is what a read outside of a step gives, and is shared out anew when it is restored.
    Without, each copy is saved. The copies of all workers are brought together before they are written: usually they
    are small, and so each worker's disk has them all.
    """

    is_on_host = True

    def __init__(self, variable: Variable) -> None:
        self.owner = self.variable = variable
        self._count = variable.replicas.count
        kind = kind_of_array(variable)
        if variable.aggregation is Aggregation.NONE:
            kind = dataclasses.replace(kind, shape=(self._count, *kind.shape), copies=self._count)
        self.kind = kind

    def copies(self) -> dict[int, HostArray]:
        """This worker's copies, by replica."""
        kind = kind_of_array(self.variable)
        found: dict[int, HostArray] = {}
        places = device_blocks(self.variable.sharding, self.variable.layout.stored_shape(self.variable.shape))
        shards = {shard.device: shard.data for shard in self.variable.stored().addressable_shards}
        for block, devices in places:
            device = next(filter(is_here, devices), None)
            if device is None:
                continue
            data = _on_host(shards[device])
            replicas, inner = ((0, 1), block) if not self.variable.is_stacked else (block[0], block[1:])
            inner = _with_data_dims(inner, kind)
            for replica in range(*replicas):
                whole = found.setdefault(replica, np.empty(kind.shape, kind.numpy_dtype))
                row = data[replica - replicas[0]] if self.variable.is_stacked else data
                whole[inside(inner, whole_block(kind.shape))] = row
        return found

    def combined(self, copies: dict[int, HostArray]) -> HostArray:
        """What is saved, from the copies of all replicas."""
        rows = [copies[replica] for replica in range(self._count)]
        aggregation = self.variable.aggregation
        if aggregation is Aggregation.NONE:
            return np.stack(rows)
        if aggregation is Aggregation.ONLY_FIRST_REPLICA:
            return rows[0]
        stacked = np.stack(rows)
        wide = stacked.astype(np.float32) if stacked.dtype.isbuiltin != 1 else stacked
        total = wide.sum(0, dtype=wide.dtype)
        if aggregation is Aggregation.MEAN:
            total = total / np.asarray(self._count, total.dtype)
        return np.asarray(total).astype(stacked.dtype)

    def parts(self) -> tuple[Part, ...]:
        everyone = tuple(range(self.variable.replicas.lockstep.workers.count))
        return (Part(whole_block(self.kind.shape), everyone),)

    def here(self) -> Sequence[Any]:
        return ()  # they are combined later

    def check(self) -> None:
        self.variable.stored()

    def needed(self) -> list[Block]:
        return [whole_block(self.kind.shape)]

    def restored(self, read: Read) -> Variable:
        variable = self.variable
        value = read(whole_block(self.kind.shape))
        if not variable.is_stacked:
            value = value[0] if self.kind.copies is not None else value
            _store(variable, variable.to_storage(_as_keys(value, self.kind)))
            return variable
        if self.kind.copies is not None:
            rows = value
        elif variable.aggregation is Aggregation.SUM:
            rows = np.stack([_share(value, replica, self._count) for replica in range(self._count)])
        else:
            rows = np.broadcast_to(value, (self._count, *value.shape))
        _store(variable, put(_as_keys(rows, self.kind), variable.sharding, may_alias=False))
        return variable


class DeviceArrayLeaf:
    """An array of JAX, which is replaced by another with the same sharding.

    If it is on devices of one worker only, all workers have the same.
    """

    def __init__(self, array: jax.Array, workers: int) -> None:
        self.owner = self.array = array
        self.kind = kind_of_array(array)
        self._workers = workers
        self._is_everywhere = workers > 1 and array.is_fully_addressable
        self._arrays_of = _way_to_arrays(array.sharding, self.kind)
        self.is_on_host = _is_on_cpu(array.sharding)

    def parts(self) -> tuple[Part, ...]:
        if self._is_everywhere:
            return (Part(whole_block(self.kind.shape), tuple(range(self._workers))),)
        places = [(_with_data_dims(block, self.kind), devices) for block, devices in self._places()]
        return parts_of(places, self.array.sharding, self.array.shape)

    def here(self) -> Sequence[Any]:
        if self._is_everywhere:
            return (_without_keys(self.array),)
        return self._arrays_of(self.array)

    def check(self) -> None:
        """Nothing is known of the array but what JAX says."""

    def needed(self) -> list[Block]:
        return _blocks_here(self._places(), self.kind)

    def restored(self, read: Read) -> jax.Array:
        array = self.array
        if self.kind.generator is not None or not array.committed:
            value = _as_keys(read(whole_block(self.kind.shape)), self.kind)
            if not array.committed:  # it may go wherever it is needed
                return jnp.array(value)
            return put(value, array.sharding, may_alias=False)
        return assembled(array.sharding, array.shape, array.dtype, read)

    def _places(self) -> tuple[tuple[Block, tuple[jax.Device, ...]], ...]:
        return device_blocks(self.array.sharding, self.array.shape)


class HostArrayLeaf:
    """An array or scalar of NumPy, which is replaced; all workers have the same."""

    is_on_host = True

    def __init__(self, array: HostArray | np.generic, workers: int) -> None:
        self.owner = self.array = array
        self.kind = kind_of_array(array)
        self._workers = workers

    def parts(self) -> tuple[Part, ...]:
        return (Part(whole_block(self.kind.shape), tuple(range(self._workers))),)

    def here(self) -> Sequence[Any]:
        return (self.array,)

    def check(self) -> None:
        """It is always there."""

    def needed(self) -> list[Block]:
        return [whole_block(self.kind.shape)]

    def restored(self, read: Read) -> Any:
        value = read(whole_block(self.kind.shape))
        return value[()] if isinstance(self.array, np.generic) else np.array(value)


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


# --- what is here ---------------------------------------------------------------------------------------


def _blocks_here(places: Sequence[tuple[Block, tuple[jax.Device, ...]]], kind: ArrayKind) -> list[Block]:
    """The blocks that this worker reads; of keys, which are small, it is the whole."""
    if kind.generator is not None:
        return [whole_block(kind.shape)]
    return [block for block, devices in places if any(map(is_here, devices))]


def _way_to_arrays(sharding: Sharding, kind: ArrayKind) -> Callable[[Any], Sequence[Any]]:
    """A function from an array to those of one device that it has here; if all are the same, to the first.

    On CPU it is the quickest that there is. Elsewhere it makes new arrays, because JAX keeps what an array has sent as
    long as there is the array.
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
    """The data of keys; other arrays as they are."""
    return jax.random.key_data(data) if is_key(data.dtype) else data


def _on_host(data: jax.Array) -> HostArray:
    return np.asarray(_without_keys(data))


def _with_data_dims(block: Block, kind: ArrayKind) -> Block:
    """A block of keys as a block of their data."""
    return block if kind.generator is None else (*block, *whole_block(kind.shape[len(block) :]))


# --- putting values back --------------------------------------------------------------------------------


def _as_keys(data: HostArray, kind: ArrayKind) -> Any:
    return data if kind.generator is None else jax.random.wrap_key_data(jnp.asarray(data), impl=kind.generator)


def _store(variable: Variable, stored: jax.Array) -> None:
    with exchanging():
        variable.slot.array = stored
        escaped.discard(variable.slot)


def _let_go_of_large(variable: Variable, blocks: Sequence[Block]) -> None:
    """Two copies of a large array may be more than there is room for."""
    if any(is_large(block, variable.dtype) for block in blocks):
        with exchanging():
            variable.slot.array = LostArray("it was let go to be restored, and the restore was broken off")
            escaped.discard(variable.slot)


def _filled(block: Block, kind: ArrayKind, read: Read) -> HostArray:
    """A block of a stored array, which goes on with zeros where the value ends."""
    real = common(block, whole_block(kind.shape))
    if real == block or not size_of(block):
        return read(block)
    filled = np.zeros(shape_of(block), kind.numpy_dtype)
    if real is not None:
        filled[inside(real, block)] = read(real)
    return filled


def _share(total: HostArray, replica: int, count: int) -> HostArray:
    """As :func:`replicax.variables.aggregation.share_of`, on the host."""
    if jnp.issubdtype(total.dtype, jnp.inexact):
        return np.asarray(total / np.asarray(count, total.dtype)).astype(total.dtype)
    quotient, remainder = np.divmod(total, np.asarray(count, total.dtype))
    return np.asarray(quotient + remainder if replica == 0 else quotient).astype(total.dtype)
