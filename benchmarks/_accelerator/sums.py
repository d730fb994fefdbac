"""Sums over all devices: how many bytes a second, beside the links and what the plan predicts; and as a step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import _measure
import jax
import jax.numpy as jnp
from _steps import _mesh
from jax import lax
from jax.sharding import PartitionSpec

import replicax
from replicax.planning.chip_specs import Chip, chip_of

_IN_A_ROW = 8
"""So many sums in a program for the bandwidth: the time of starting it is shared."""


def all_reduce(largest: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Sums of 4 KiB to ``largest`` bytes of float32, ``seconds`` for each size.

    The bandwidth is ``busbw`` of NCCL's tests: what a ring sends over each link, 2(n − 1)/n of the array, in the time
    of one sum.
    """
    devices = jax.local_devices()
    chip, n = _chip(devices), len(devices)
    size = 4096
    while size <= largest:
        [row] = _measure.interleave([_by_jax(devices, size, _IN_A_ROW)], seconds, warmup=3)
        calls = [_by_replicax(devices, size), _by_jax(devices, size, 1)]
        paired = _measure.Paired(*_measure.interleave(calls, seconds, warmup=3))
        took = statistics.median(row) / _IN_A_ROW
        yield {
            "table": "sums",
            "devices": n,
            "bytes": size,
            "seconds": took,
            "bandwidth": 2 * (n - 1) / n * size / took,
            "link": None if chip is None else chip.link * chip.links or None,
            "predicted_s": _predicted(devices, size, chip),
            "step_over_jax": paired.ratio,
            "step_over_jax_95": paired.interval,
        }
        size *= 8


def _by_jax(devices: list[jax.Device], size: int, times: int) -> Callable[[], None]:
    mesh, _, along = _mesh(devices)

    def sums(x: Any) -> Any:
        for _ in range(times):
            x = lax.psum(x, "replica") / len(devices)
        return x

    specs = {"in_specs": along.spec, "out_specs": PartitionSpec()}
    jitted = jax.jit(jax.shard_map(sums, mesh=mesh, check_vma=False, **specs))
    # Made on the devices: all of them together may have more memory than the host.
    x = jax.jit(lambda: jnp.ones((len(devices), size // 4), jnp.float32), out_shardings=along)()

    def call() -> None:
        jitted(x).block_until_ready()

    return call


def _by_replicax(devices: list[jax.Device], size: int) -> Callable[[], None]:
    strategy = replicax.MirroredStrategy(devices)
    x = strategy.run(lambda: jnp.full(size // 4, 1.0, jnp.float32) + _own_number())

    def call() -> None:
        strategy.run(_mean, args=(x,)).block_until_ready()

    return call


def _mean(x: Any) -> Any:
    return replicax.get_replica_context().all_reduce("mean", x)


def _own_number() -> Any:
    """Of the replica: what it is added to is the replica's own."""
    return jnp.float32(replicax.get_replica_context().replica_id_in_sync_group)


def _predicted(devices: list[jax.Device], size: int, chip: Chip | None) -> float | None:
    """The seconds of one sum, by the plan."""
    strategy = replicax.MirroredStrategy(devices)
    found = replicax.plan(strategy, _mean, jax.ShapeDtypeStruct((size // 4,), jnp.float32), chip=chip)
    return sum(row.count * row.seconds for row in found.collectives if row.seconds is not None) or None


def _chip(devices: list[jax.Device]) -> Chip | None:
    if devices[0].platform == "cpu":
        from replicax.planning.calibration import measured_chip

        return measured_chip(devices)
    return chip_of(devices[0].device_kind)
