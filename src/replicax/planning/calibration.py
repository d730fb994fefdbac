"""Measure what emulated devices can do: time a few small programs on all of them at once.

Devices that JAX emulates on a CPU share its cores, so what each can do is measured while all are busy. Nothing overlaps
there: a core that sums what another has sent does not multiply meanwhile. So the estimate of a step is the sum of its
parts, and each part has a program here:

=============  =====================================================================
``flops``      products of 256×256 matrices of float32, one after the other
``arithmetic`` polynomials and exponentials of numbers that stay in the cache
``bandwidth``  arrays of 4 MiB are read and written
``launch``     a chain of products of 4×4 matrices, which are too small to count
``meeting``    sums of one number over all devices, with products between them
``link``       a sum of 1 MiB over all devices
=============  =====================================================================

A collective is measured between products, as in a step: devices that share cores come to it one by one, and the
last one's core is often the only one that works. A chain of nothing but sums can't show that, and a collective seems
to take a fraction of the time.

It is coarse. A CPU is faster at large products than at small ones, at data in its cache than at other data, and
bfloat16 is converted on the way. The order of cases that differ by a fifth can be told, and not the time of each;
``benchmarks/search.py`` measures how far that goes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from replicax.devices.selection import use_cpu_devices
from replicax.planning.chip_specs import Chip

_AXIS = "device"
_ROUNDS = 5
_SIDE = 256
_ARRAY = 2**20  # float32 numbers, 4 MiB
_PACK = 2**18  # 1 MiB
_CACHED = 2**14
_DEGREE = 8
_CHAIN = 16
_SMALL_SIDE, _BETWEEN = 128, 4  # the side and the number of the products between collectives


def measured_chip(devices: Sequence[jax.Device]) -> Chip:
    """Measure what each of these devices can do while all are busy; takes a few seconds.

    Args:
      devices: devices of one process, such as emulated CPU devices.

    Raises:
      ValueError: ``devices`` is empty.

    >>> import jax
    >>> from replicax.planning.calibration import measured_chip
    >>> chip = measured_chip(jax.devices()[:2])
    >>> chip.is_serial, chip.flops > 1e8, chip.bandwidth > 1e7
    (True, True, True)
    """
    if not devices:
        raise ValueError("measured_chip: expected at least one device, got none")
    mesh = Mesh(np.array(devices), (_AXIS,))
    count = len(devices)
    # What an empty call takes is subtracted.
    idle = _seconds(mesh, lambda x: x, 1, 1)
    product = _seconds(mesh, lambda x: x @ jnp.full((_SIDE, _SIDE), 1 / _SIDE), (_SIDE, _SIDE), 16) - idle / 16
    copy = _seconds(mesh, lambda x: x + 1, _ARRAY, 4) - idle / 4
    numbers = _seconds(mesh, _arithmetic, _CACHED, 64) - idle / 64
    launch = _seconds(mesh, _small_products, (4, 4), 64) / _CHAIN
    collective = sent = 0.0
    if count > 1:
        alone = _seconds(mesh, _some_products, (_SMALL_SIDE, _SMALL_SIDE), 32)
        collective = max(0.0, _seconds(mesh, _products_and_collective, (_SMALL_SIDE, _SMALL_SIDE), 32) - alone)
        summing = _seconds(mesh, lambda x: lax.psum(x, _AXIS) / count, 1, 32)
        sent = max(1e-9, _seconds(mesh, lambda x: lax.psum(x, _AXIS) / count, _PACK, 4) - summing)
    whole = 4 * _PACK
    return Chip(
        name=f"emulated {devices[0].platform}",
        flops=2 * _SIDE**3 / max(product, 1e-9),
        memory=_memory() / count,
        bandwidth=2 * 4 * _ARRAY / max(copy, 1e-9),
        link=2 * whole * (count - 1) / count / sent if count > 1 else 0.0,
        links=1,
        sources=(f"measured on this machine, with all {count} device(s) busy",),
        arithmetic=_CACHED * (2 * _DEGREE + 1) / max(numbers, 1e-9),
        launch=launch,
        meeting=collective,
        is_serial=True,
    )


def _small_products(x: jax.Array) -> jax.Array:
    """Products that can't become one, as each needs the one before it."""
    for _ in range(_CHAIN):
        x = lax.optimization_barrier(x @ x)
    return x


def _some_products(x: jax.Array) -> jax.Array:
    """Compute what a device may do between two collectives."""
    for _ in range(_BETWEEN):
        x = lax.optimization_barrier(x @ jnp.full((_SMALL_SIDE, _SMALL_SIDE), 1 / _SMALL_SIDE))
    return x


def _products_and_collective(x: jax.Array) -> jax.Array:
    x = _some_products(x)
    return x + 0 * lax.psum(x[0, 0], _AXIS)


def _arithmetic(x: jax.Array) -> jax.Array:
    """A polynomial, and an exponential: twice the degree, and one more FLOP, as plans count them."""
    y = x
    for i in range(_DEGREE - 1):
        y = y * x + float(i)
    return jnp.exp(-y) * 0.5


@jax.disable_jit(False)
def _seconds(mesh: Mesh, body: Callable[[Any], Any], shape: int | tuple[int, ...], iterations: int) -> float:
    """Return the seconds of an iteration on each device, of ``iterations`` in a loop: the best of a few tries."""
    spec = PartitionSpec(_AXIS)

    def loop(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, iterations, lambda _, y: body(y), x[0])[None]

    compiled = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    each = (shape,) if isinstance(shape, int) else shape
    x = jax.device_put(np.full((mesh.size, *each), 0.5, np.float32), jax.NamedSharding(mesh, spec))
    compiled(x).block_until_ready()
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        compiled(x).block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times) / iterations


def _memory() -> float:
    """The machine's main memory, in bytes."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def write_measured(path: str, devices: str) -> None:
    """Emulate so many devices, measure them, and write the :class:`Chip` as JSON; runs in a process of its own."""
    use_cpu_devices(int(devices))
    Path(path).write_text(json.dumps(dataclasses.asdict(measured_chip(jax.devices()))))
