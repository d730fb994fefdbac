"""Plan mode: how long it takes to trace and to compile one step for 8 to 6,144 chips.

    python benchmarks/plan.py

Prints a table, and writes ``results/plan.json``. The bar: 6,144 chips take at most three times as long as 8. With
``--sharded`` variables are in pieces; then it is another program for each number of pieces, and there is no bar. Needs
libtpu. See README.md.
"""

from __future__ import annotations

import os
import statistics
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _measure
import jax
import jax.numpy as jnp
import optax

import replicax

SLICES = ("v5p:2x2x2", "v5p:4x4x4", "v5p:8x8x8", "v5p:16x16x24")
LAYERS, WIDTH, BATCH = 8, 4096, 64
ROUNDS = 2
BAR = 3.0


def build(strategy: replicax.Strategy) -> tuple[Any, Any]:
    """A training step of ``LAYERS`` square layers with Adam, and what a replica takes."""
    with strategy.scope():
        layers = [replicax.Variable(lambda: jnp.zeros((WIDTH, WIDTH)), name=f"layer{i}") for i in range(LAYERS)]
        optimizer = replicax.Optimizer(optax.adam(1e-3))

    def step(x: Any) -> Any:
        def loss() -> Any:
            h = x
            for layer in layers:
                h = jax.nn.relu(h @ layer)
            return replicax.compute_average_loss(jnp.square(h).mean(-1))

        share, gradients = replicax.value_and_grad(loss, layers)()
        optimizer.apply_gradients(zip(gradients, layers, strict=True))
        return share

    return step, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)


def measure(name: str, kind: str) -> dict[str, float]:
    resolver = replicax.TPUClusterResolver(topology=name)
    strategy: replicax.Strategy
    if kind == "sharded":
        strategy = replicax.ShardedStrategy(list(resolver.devices.flat))
    else:
        strategy = replicax.TPUStrategy(resolver)
    found = replicax.plan(strategy, *build(strategy))
    assert found.fits
    return {"replicas": found.replicas, "trace_s": found.trace_seconds, "compile_s": found.compile_seconds}


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    kind = "sharded" if "--sharded" in sys.argv[1:] else "mirrored"
    measure(SLICES[0], kind)  # what is slow only once
    # In turn, so that the noise of a busy machine falls on all alike.
    rounds = [[measure(name, kind) for name in SLICES] for _ in range(ROUNDS)]
    table = Table("chips", "trace", "compile", "against 8 chips", title=f"{LAYERS} layers of {WIDTH}², {kind}")
    rows: list[dict[str, Any]] = []
    for i, name in enumerate(SLICES):
        trace, compile_ = (statistics.median(row[i][key] for row in rounds) for key in ("trace_s", "compile_s"))
        rows.append({"slice": name, "replicas": rounds[0][i]["replicas"], "trace_s": trace, "compile_s": compile_})
        rows[-1]["ratio"] = (trace + compile_) / (rows[0]["trace_s"] + rows[0]["compile_s"])
        table.add_row(f"{rows[-1]['replicas']:,}", f"{trace:.2f} s", f"{compile_:.1f} s", f"{rows[-1]['ratio']:.2f}×")
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    _measure.write(
        "plan.json" if kind == "mirrored" else "plan_sharded.json",
        {"layers": LAYERS, "width": WIDTH, "rounds": ROUNDS, "rows": rows},
    )
    if kind == "mirrored" and rows[-1]["ratio"] > BAR:
        sys.exit(f"{rows[-1]['ratio']:.2f}× is above the bar of {BAR}×")


if __name__ == "__main__":
    main()
