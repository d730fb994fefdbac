"""Replicas that share a device: one after the other, and several at the same time (``replicas_at_once``).

    python benchmarks/replicas.py            # about three minutes
    python benchmarks/replicas.py --quick    # a third of the time, and noisier

A step of an MLP of two square layers, with Adam, on one emulated device. All ways are called in turn; the first call
and the memory of temporaries are measured before. Writes ``results/replicas.json``. See README.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import _measure
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import replicax

CASES = [(8, 32, 4), (64, 32, 4), (64, 32, 32), (8, 256, 4), (64, 256, 32), (8, 1024, 8)]
"""How many replicas there are, how wide the layers are, and how many examples each replica has."""


def training(replicas: int, width: int, examples: int, at_once: int) -> tuple[Callable[[], None], Callable[[], int]]:
    """A call of the step, and what tells the bytes of its temporaries."""
    strategy = replicax.MirroredStrategy(["cpu:0"], num_replicas=replicas, replicas_at_once=at_once)
    rng = np.random.default_rng(0)
    with strategy.scope():
        layers = [replicax.Variable((rng.normal(size=(width, width)) / width**0.5).astype(np.float32)) for _ in "ab"]
        optimizer = replicax.Optimizer(optax.adam(1e-3))
        optimizer.build(layers)
    [batch] = strategy.distribute_dataset([rng.normal(size=(replicas * examples, width)).astype(np.float32)])

    def step(x: Any) -> None:
        def loss() -> Any:
            return replicax.compute_average_loss(jnp.square(jnp.tanh(jnp.tanh(x @ layers[0]) @ layers[1])).sum(-1))

        _, gradients = replicax.value_and_grad(loss, layers)()
        optimizer.apply_gradients(zip(gradients, layers, strict=True))

    def call() -> None:
        strategy.run(step, args=(batch,))
        jax.block_until_ready(layers[0].value)

    def temporaries() -> int:
        return strategy.extended.trace(step, args=(batch,)).compiled().memory_analysis().temp_size_in_bytes

    return call, temporaries


def measure_here(devices: int, turn: int, share: float) -> Any:
    replicax.use_cpu_devices(devices)
    found = []
    for replicas, width, examples in CASES:
        ways = sorted({1, 8, replicas})
        calls, firsts, sizes = [], [], []
        for at_once in ways:
            call, temporaries = training(replicas, width, examples, at_once)
            start = time.perf_counter()
            call()
            firsts.append(time.perf_counter() - start)
            sizes.append(temporaries())
            calls.append(call)
        for at_once, first, size, call in zip(ways, firsts, sizes, calls, strict=True):
            paired = _measure.Paired(*_measure.interleave([call, calls[0]], 6 * share))
            case = {"replicas": replicas, "width": width, "examples": examples, "at_once": at_once}
            found.append({**case, "first_s": first, "temporaries": size, **paired.summary()})
    return found


def measure(rounds: int, share: float) -> dict[str, Any]:
    cases = _measure.in_subprocess("replicas.py", "--devices=1", f"--share={share}")
    table = Table(title="A step of replicas that share one device: so many at once (A), and one after the other (B)")
    for column in (
        "replicas",
        "width",
        "examples of each",
        "at once",
        "first call",
        "temporaries",
        "A",
        "B",
        "A / B",
        "95%",
    ):
        table.add_column(column, justify="right")
    for case in cases:
        low, high = case["ratio_95"]
        table.add_row(
            *(str(case[name]) for name in ("replicas", "width", "examples", "at_once")),
            f"{case['first_s']:.1f} s",
            f"{case['temporaries'] / 2**20:.2f} MiB",
            f"{case['a_ms']:.2f} ms",
            f"{case['b_ms']:.2f} ms",
            f"{case['ratio']:.2f}",
            f"{low:.2f}–{high:.2f}",
        )
    Console(width=130).print(table)
    return {"cases": cases}


if __name__ == "__main__":
    results = _measure.measured(__doc__ or "", "a third", measure_here, measure, 1, 0.3)
    _measure.write("replicas.json", results)
    sys.exit(0)
