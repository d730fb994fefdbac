"""What ``replicax.collectives.PACK_LIMIT`` rests on: which arrays are worth packing before an all-reduce?

    python benchmarks/packing.py [--quick]

A step that subtracts the sum of the replicas' gradients from the parameters: with ``lax.psum`` of the tree,
and with the arrays up to a limit packed into one buffer first. Prints a table, writes ``results/packing.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import _measure
from _measure import Paired

DEVICES = (2, 4, 8)
KIB = 1024
LIMITS: dict[str, int] = {"64 KiB": 64 * KIB, "256 KiB": 256 * KIB, "1 MiB": 1024 * KIB, "any size": 1 << 40}
GRADIENTS: dict[str, list[tuple[int, ...]]] = {
    "200 × 8": [(8,)] * 200,
    "100 × 32×32": [(32, 32)] * 100,
    "MLP 784-512-512-10": [(784, 512), (512,), (512, 512), (512,), (512, 10), (10,)],
    "20 × 256×256": [(256, 256)] * 20,
    "4 × 1024×1024": [(1024, 1024)] * 4,
}


def measure_here(devices: int, seconds: float) -> dict[str, Any]:
    """The times of each way for each set of gradients, on ``devices`` devices, in this process."""
    import replicax

    replicax.use_cpu_devices(devices)
    results = {}
    for name, shapes in GRADIENTS.items():
        calls = [_step(shapes, None), *(_step(shapes, limit) for limit in LIMITS.values())]
        results[name] = _measure.interleave(calls, seconds, warmup=5)
    return results


def _step(shapes: list[tuple[int, ...]], limit: int | None) -> Callable[[], None]:
    import jax
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from replicax import ReduceOp, collectives
    from replicax.devices.mesh import REPLICA_AXIS

    mesh = Mesh(np.array(jax.devices()), (REPLICA_AXIS,))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def step(params: list[Any]) -> list[Any]:
        mine = 1e-6 * lax.axis_index(REPLICA_AXIS)
        gradients = [mine * p for p in params]
        if limit is None:
            total = lax.psum(gradients, REPLICA_AXIS)
        else:
            collectives.PACK_LIMIT = limit
            total = collectives.all_reduce(ReduceOp.SUM, gradients)
        return [p - g for p, g in zip(params, total, strict=True)]

    spec = PartitionSpec()
    mapped = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    jitted = jax.jit(mapped, donate_argnums=0, out_shardings=everywhere)
    params = jax.device_put([np.full(shape, i, np.float32) for i, shape in enumerate(shapes)], everywhere)

    def call() -> None:
        nonlocal params
        params = jitted(params)
        params[0].block_until_ready()

    return call


def measure(seconds: float) -> list[dict[str, Any]]:
    rows = []
    for devices in DEVICES:
        results = _measure.in_subprocess("packing.py", "--devices", str(devices), "--seconds", str(seconds))
        for name, (tree, *packed) in results.items():
            by_limit = dict(zip(LIMITS, packed, strict=True))
            rows.append(
                {
                    "gradients": name,
                    "devices": devices,
                    "rounds": len(tree),
                    "tree_ms": statistics.median(tree) * 1e3,
                    "packed_ms": {n: statistics.median(times) * 1e3 for n, times in by_limit.items()},
                    "times_faster": {n: Paired(tree, times).ratio for n, times in by_limit.items()},
                }
            )
    return sorted(rows, key=lambda row: list(GRADIENTS).index(row["gradients"]))


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    headers = ["devices", "psum of tree", *(f"packed: {limit}" for limit in LIMITS)]
    columns = [Column(header, justify="right", no_wrap=True) for header in headers]
    table = Table("gradients", *columns)
    table.title = "Time of a step, and how many times faster than psum of the tree"
    for row in rows:
        packed = (f"{row['packed_ms'][n]:.2f} ms {row['times_faster'][n]:.2f}×" for n in LIMITS)
        table.add_row(row["gradients"], str(row["devices"]), f"{row['tree_ms']:.2f} ms", *packed)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Which arrays are worth packing before an all-reduce?")
    parser.add_argument("--quick", action="store_true", help="a quarter of the time, and noisier")
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)  # one process of the measurement
    parser.add_argument("--seconds", type=float, default=4.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.devices is not None:
        print(json.dumps(measure_here(options.devices, options.seconds)))
        return
    rows = measure(options.seconds / 4 if options.quick else options.seconds)
    show(rows)
    _measure.write("packing.json", {"rows": rows})


if __name__ == "__main__":
    main()
