"""What a device holds of a 24-layer transformer: mirrored, and split over the replicas.

    python benchmarks/memory.py

Prints a table from the compiled programs' own memory analysis, and writes ``results/memory.json``. See README.md.
"""

from __future__ import annotations

import collections
import math
import sys
from typing import Any

import _measure
import jax
import jax.numpy as jnp
import optax

import replicax

LAYERS, WIDTH, HEADS, WORDS, LENGTH, BATCH = 24, 256, 4, 1024, 32, 1
SHAPES = {
    "qkv": (WIDTH, 3 * WIDTH),
    "out": (WIDTH, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
    "scales": (2, WIDTH),
}
LAYER_BYTES = 4 * sum(math.prod(shape) for shape in SHAPES.values())
MODEL_BYTES = LAYERS * LAYER_BYTES + 4 * WORDS * WIDTH


def norm(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def block(layer: dict[str, Any], x: Any) -> Any:
    length, width = x.shape[-2:]
    scales = layer["scales"].value
    q, k, v = jnp.split((norm(x, scales[0]) @ layer["qkv"]).reshape(-1, length, 3 * HEADS, width // HEADS), 3, axis=2)
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), where=jnp.tril(jnp.ones((length, length), bool)))
    x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ layer["out"]
    return x + jax.nn.gelu(norm(x, scales[1]) @ layer["up"]) @ layer["down"]


def compile_step(strategy: replicax.Strategy) -> replicax.Executable:
    """One training step with Adam, of a language model with a tied embedding."""
    with strategy.scope():
        table = replicax.Variable(lambda: 0.1 * jnp.ones((WORDS, WIDTH)), name="table")
        layers = [
            {
                name: replicax.Variable(lambda shape=shape: 0.1 * jnp.ones(shape), name=name)
                for name, shape in SHAPES.items()
            }
            for _ in range(LAYERS)
        ]
        optimizer = replicax.Optimizer(optax.adam(1e-3))
    variables = [table, *(v for layer in layers for v in layer.values())]

    def step(words: Any) -> None:
        def loss() -> Any:
            x = table.value[words[:, :-1]]
            for layer in layers:
                x = jax.checkpoint(lambda x, layer=layer: block(layer, x))(x)
            losses = optax.softmax_cross_entropy_with_integer_labels(x @ table.value.T, words[:, 1:])
            return replicax.compute_average_loss(losses.mean(-1))

        _, gradients = replicax.value_and_grad(loss, variables)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    words = jnp.zeros((BATCH, LENGTH + 1), jnp.int32)
    batch = strategy.distribute_values_from_function(lambda ctx: words + ctx.replica_id_in_sync_group)
    return strategy.extended.trace(step, args=(batch,))


def measure(strategy: replicax.Strategy) -> dict[str, Any]:
    program = compile_step(strategy)
    memory: Any = program.compiled().memory_analysis()
    found = program.collectives()
    return {
        "strategy": type(strategy).__name__,
        "replicas": strategy.num_replicas_in_sync,
        "kept": memory.argument_size_in_bytes / (3 * MODEL_BYTES),
        "temporaries_in_layers": memory.temp_size_in_bytes / LAYER_BYTES,
        "temporaries": memory.temp_size_in_bytes / MODEL_BYTES,
        "collectives": collections.Counter(c.kind for c in found),
        "bytes": {k: sum(c.bytes for c in found if c.kind == k) / MODEL_BYTES for k in sorted({c.kind for c in found})},
    }


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    replicax.use_cpu_devices(8)
    rows = []
    for kind in (replicax.MirroredStrategy, replicax.ShardedStrategy):
        for replicas in (2, 4, 8):
            rows.append(measure(kind([f"cpu:{i}" for i in range(replicas)])))
    table = Table("", "replicas", "kept", "temporaries", "in layers", "collectives (× the model's bytes)")
    table.title = f"One device, a training step of {LAYERS} layers: kept and temporaries, as shares of the whole"
    for row in rows:
        collectives = ", ".join(f"{n} {k} ({row['bytes'][k]:.2f})" for k, n in sorted(row["collectives"].items()))
        table.add_row(
            row["strategy"],
            str(row["replicas"]),
            f"{row['kept']:.3f}",
            f"{row['temporaries']:.3f}",
            f"{row['temporaries_in_layers']:.1f}",
            collectives,
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    _measure.write("memory.json", {"model_bytes": MODEL_BYTES, "layer_bytes": LAYER_BYTES, "rows": rows})


if __name__ == "__main__":
    main()
