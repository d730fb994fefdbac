"""A pipeline through ``assign_to_logical_device``: what each device holds, and how long a step takes.

    python benchmarks/pipeline.py

Compares a model on one device with the same in two stages, with 1, 4 and 8 microbatches, and with what a textbook
pipeline takes, in which a device waits while the stages are filled and drained. The layers of a stage are a scan, whose
operations XLA runs one after the other, on one thread: so emulated devices do not take each other's cores, as long as
there are as many of these. Prints a table and writes ``results/pipeline.json``. See README.md.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"

import _measure
import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax

STAGES, LAYERS, WIDTH, BATCH = 2, 8, 256, 1024  # layers of a stage
MICROBATCHES = (1, 4, 8)


def make(stages: int, microbatches: int) -> tuple[replicax.Strategy, Any, tuple[Any, Any], list[Any]]:
    """A residual network of the same layers, on one device or in stages: the step and its arguments."""
    devices = np.array(jax.devices()[:stages]).reshape(1, stages)
    strategy = replicax.Strategy(replicax.StrategyExtended(devices))
    key = jax.random.key(0)
    with strategy.scope():
        weights = [
            replicax.Variable(
                lambda k=k: jax.random.normal(jax.random.fold_in(key, k), (LAYERS, WIDTH, WIDTH)) / WIDTH,
                name=f"stage{k}",
                logical_device=k * stages // STAGES,
            )
            for k in range(STAGES)
        ]
        optimizer = replicax.Optimizer(optax.sgd(1e-3, momentum=0.9))
        optimizer.build(weights)

    def layer(h: Any, w: Any) -> tuple[Any, None]:
        return h + jnp.tanh(h @ w), None

    def step(x: Any, y: Any) -> Any:
        y = strategy.assign_to_logical_device(y, stages - 1)

        def loss_fn() -> Any:
            total = 0.0
            for h, target in zip(jnp.split(x, microbatches), jnp.split(y, microbatches), strict=True):
                for k, w in enumerate(weights):
                    h = strategy.assign_to_logical_device(h, k * stages // STAGES)
                    h, _ = jax.lax.scan(layer, h, w.value)
                total += jnp.mean((h - target) ** 2) / microbatches
            return total

        loss, gradients = replicax.value_and_grad(loss_fn, weights)()
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return loss

    rng = np.random.default_rng(0)
    arguments = tuple(jnp.asarray(rng.normal(size=(BATCH, WIDTH)), jnp.float32) for _ in range(2))
    return strategy, step, arguments, [*weights, *optimizer.variables]


def kept(variables: list[Any]) -> list[int]:
    """Bytes of variables on each device that has any."""
    found: dict[int, int] = {}
    for v in variables:
        for shard in v.value.addressable_shards:
            found[shard.device.id] = found.get(shard.device.id, 0) + shard.data.nbytes
    return [found[d] for d in sorted(found)]


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    replicax.use_cpu_devices(STAGES)
    cases = [(1, 1), *((STAGES, m) for m in MICROBATCHES)]
    calls, rows = [], []
    for stages, microbatches in cases:
        strategy, step, arguments, variables = make(stages, microbatches)
        first = float(strategy.run(step, args=arguments))
        row: dict[str, Any] = {"stages": stages, "microbatches": microbatches, "loss": first}
        row["kept_mib"] = [round(b / 2**20, 2) for b in kept(variables)]
        if stages > 1:
            report = strategy.extended.trace(step, args=arguments).placement()
            row["programs"] = sum(d.regions for d in report.devices)
            row["sent_mib"] = [round(t.bytes / 2**20, 2) for t in report.transfers]
        rows.append(row)

        def call(strategy: Any = strategy, step: Any = step, arguments: Any = arguments, last: Any = variables) -> None:
            strategy.run(step, args=arguments)
            jax.block_until_ready([v.slot.array for v in last])

        calls.append(call)
    assert len({round(row["loss"], 5) for row in rows}) == 1
    times = _measure.interleave(calls, seconds=40, warmup=3)
    table = Table(
        "stages", "microbatches", "programs", "kept (MiB a device)", "sent (MiB)", "ms", "of one device", "bound"
    )
    table.title = f"A step of {STAGES * LAYERS} layers of {WIDTH}², batch {BATCH}, SGD with momentum"
    for row, measured in zip(rows, times, strict=True):
        row["ms"] = 1e3 * float(np.median(measured))
        row["ratio"] = _measure.Paired(measured, times[0]).ratio
        row["textbook"] = (row["microbatches"] + row["stages"] - 1) / (row["microbatches"] * row["stages"])
        table.add_row(
            str(row["stages"]),
            str(row["microbatches"]),
            str(row.get("programs", 1)),
            ", ".join(map(str, row["kept_mib"])),
            ", ".join(map(str, row.get("sent_mib", []))),
            f"{row['ms']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['textbook']:.2f}",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    _measure.write("pipeline.json", {"rows": rows})


if __name__ == "__main__":
    main()
