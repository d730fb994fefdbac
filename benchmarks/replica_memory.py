"""What a device with several replicas holds of a 12-layer transformer: mirrored, and split over the devices.

    python benchmarks/replica_memory.py

On 4 emulated devices, each of which has the same 8 sequences, in as many parts as it has replicas. Memory is that of
the compiled program's own analysis, and collectives are counted in it as often as they run. Writes
``results/replica_memory.json``. See README.md.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import _measure
import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import replicax
from replicax.hlo.collective_instructions import collectives_of
from replicax.hlo.instructions import parse

DEVICES, SEQUENCES, LAYERS, WIDTH, HEADS, WORDS, LENGTH = 4, 8, 12, 256, 4, 1024, 32
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


@jax.checkpoint
def block(x: Any, layer: dict[str, Any]) -> Any:
    heads = (norm(x, layer["scales"][0]) @ layer["qkv"]).reshape(-1, LENGTH, 3 * HEADS, WIDTH // HEADS)
    q, k, v = jnp.split(heads, 3, axis=2)
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), where=jnp.tril(jnp.ones((LENGTH, LENGTH), bool)))
    x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ layer["out"]
    return x + jax.nn.gelu(norm(x, layer["scales"][1]) @ layer["up"]) @ layer["down"]


def compile_step(strategy: replicax.Strategy) -> replicax.Executable:
    """One training step with Adam, of a language model with a tied embedding, whose layers are one scan."""
    with strategy.scope():
        model = {"table": replicax.Variable(lambda: 0.1 * jnp.ones((WORDS, WIDTH)), name="table")} | {
            name: replicax.Variable(lambda shape=shape: 0.1 * jnp.ones((LAYERS, *shape)), name=name)
            for name, shape in SHAPES.items()
        }
        optimizer = replicax.Optimizer(optax.adam(1e-3))

    def step(words: Any) -> None:
        def loss() -> Any:
            layers = {name: model[name].value for name in SHAPES}
            table = model["table"].value
            x, _ = jax.lax.scan(lambda x, layer: (block(x, layer), None), table[words[:, :-1]], layers)
            losses = optax.softmax_cross_entropy_with_integer_labels(x @ table.T, words[:, 1:])
            return replicax.compute_average_loss(losses.mean(-1))

        _, gradients = replicax.value_and_grad(loss, model)()
        optimizer.apply_gradients(gradients, model)

    each = SEQUENCES * DEVICES // strategy.num_replicas_in_sync
    return strategy.extended.trace(step, args=(jax.ShapeDtypeStruct((each, LENGTH + 1), jnp.int32),))


def measure(strategy: replicax.Strategy) -> dict[str, Any]:
    program = compile_step(strategy)
    memory: Any = program.compiled().memory_analysis()
    sent: dict[str, float] = {}
    for use in collectives_of(parse(program.compiled_text()), {"replica": DEVICES}):
        sent[use.kind] = sent.get(use.kind, 0.0) + use.count * use.whole / MODEL_BYTES
    return {
        "strategy": type(strategy).__name__,
        "replicas_on_each": strategy.num_replicas_in_sync // DEVICES,
        "kept": memory.argument_size_in_bytes / (3 * MODEL_BYTES),
        "temporaries": memory.temp_size_in_bytes / MODEL_BYTES,
        "temporaries_in_layers": memory.temp_size_in_bytes / LAYER_BYTES,
        "collectives": sent,
    }


def main() -> None:
    replicax.use_cpu_devices(DEVICES)
    rows = []
    for kind in (replicax.MirroredStrategy, replicax.ShardedStrategy):
        for each in (1, 2, 4):
            rows.append(measure(kind([f"cpu:{i}" for i in range(DEVICES)], num_replicas=DEVICES * each)))
    table = Table("", "replicas on each", "kept", "temporaries", "in layers", "collectives (× the model's bytes)")
    table.title = f"One of {DEVICES} devices, a training step of {LAYERS} layers: as shares of the whole model"
    for row in rows:
        table.add_row(
            row["strategy"],
            str(row["replicas_on_each"]),
            f"{row['kept']:.3f}",
            f"{row['temporaries']:.2f}",
            f"{row['temporaries_in_layers']:.1f}",
            ", ".join(f"{kind} {share:.2f}" for kind, share in sorted(row["collectives"].items())),
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    _measure.write("replica_memory.json", {"model_bytes": MODEL_BYTES, "layer_bytes": LAYER_BYTES, "rows": rows})


if __name__ == "__main__":
    main()
