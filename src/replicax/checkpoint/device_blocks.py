"""Blocks on devices: the block of an array that each device has, and assembling an array from blocks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from replicax.checkpoint.storage.blocks import Block, block_at, inside, pieces_of, shape_of, size_of
from replicax.devices.mesh import is_here

HostArray = np.ndarray[Any, Any]
Read = Callable[[Block], HostArray]
"""Returns a block of the saved array."""

LARGE = 256 << 20
"""A larger block goes to its device piece by piece, after the old array has been freed."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A block of an array, and the processes that have it."""

    block: Block
    workers: tuple[int, ...]
    is_here: bool = True
    """Whether this worker has it."""
    position: int = 0
    """The number of this worker's device to copy it from, if it is here."""
    is_filled: bool = False
    """Whether the device also has padding, which is not part of the value."""


@dataclasses.dataclass(frozen=True)
class PartPiece:
    """A piece of a part."""

    block: Block
    position: int
    cut: tuple[slice, ...] | None
    """Its slices in the worker's array of that position; ``None`` if it is all of it."""

    @classmethod
    def of(cls, part: Part, block: Block) -> PartPiece:
        """The piece of ``part`` with this ``block``."""
        cut = None if block == part.block and not part.is_filled else inside(block, part.block)
        return cls(block, part.position, cut)


# --- the devices of each block -------------------------------------------------------------------------


@functools.lru_cache(maxsize=10_000)
def device_blocks(sharding: Sharding, shape: tuple[int, ...]) -> tuple[tuple[Block, tuple[jax.Device, ...]], ...]:
    """The blocks of an array of ``shape``, each with all devices that have it."""
    found: dict[Block, list[jax.Device]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        found.setdefault(block_at(index or (), shape), []).append(device)
    return tuple((block, tuple(devices)) for block, devices in found.items())


@functools.lru_cache(maxsize=10_000)
def _local_devices(sharding: Sharding, shape: tuple[int, ...]) -> dict[Any, int]:
    """This worker's devices of an array of ``shape``, in the order of its shards."""
    devices: Iterable[Any] = sharding.devices_indices_map(shape)
    return {device: position for position, device in enumerate(filter(is_here, devices))}


def is_large(block: Block, dtype: Any) -> bool:
    """Return whether a block has more than :data:`LARGE` bytes."""
    return size_of(block) * np.dtype(dtype).itemsize > LARGE


def parts_of(
    places: Sequence[tuple[Block, tuple[jax.Device, ...]]],
    sharding: Sharding,
    shape: tuple[int, ...],
    is_filled: bool = False,
) -> tuple[Part, ...]:
    """The parts in which an array is saved. ``places`` are its blocks, each with all devices that have it.

    ``sharding`` and ``shape`` are those of the stored array, which includes padding if it ``is_filled``.
    """
    order = _local_devices(sharding, shape)
    found = []
    for block, devices in places:
        here = [order[device] for device in devices if device in order]
        workers = tuple(sorted({device.process_index for device in devices}))
        found.append(Part(block, workers, bool(here), min(here, default=0), is_filled))
    return tuple(found)


# --- assembling an array --------------------------------------------------------------------------------


def assembled(sharding: Sharding, shape: tuple[int, ...], dtype: Any, read: Read) -> jax.Array:
    """An array with ``sharding``, assembled from blocks; each worker assembles its parts."""
    shards = []
    for block, devices in device_blocks(sharding, shape):
        here = list(filter(is_here, devices))
        if here and is_large(block, dtype) and sharding.memory_kind == here[0].default_memory().kind:
            shards += [_large(block, dtype, device, read) for device in here]
        elif here:
            data = read(block)
            places = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in here]
            shards += [jax.device_put(data, place, may_alias=False) for place in places]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


@jax.disable_jit(False)
def _large(block: Block, dtype: Any, device: jax.Device, read: Read) -> jax.Array:
    """A block on a device; the host never has more than a piece of it."""
    array = jax.jit(lambda: jnp.zeros(shape_of(block), dtype), out_shardings=SingleDeviceSharding(device))()
    for piece in pieces_of(block, np.dtype(dtype).itemsize):
        start = [part.start for part in inside(piece, block)]
        array = _updated_array(array, jax.device_put(read(piece), device, may_alias=False), start)
    return array


_updated_array = jax.jit(jax.lax.dynamic_update_slice, donate_argnums=0)
