"""What a device with several replicas holds of a 12-layer transformer: mirrored, and split over the devices.

    python benchmarks/replica_memory.py

On 4 emulated devices, each of which has the same 8 sequences, in as many parts as it has replicas. Memory is that of
the compiled program's own analysis, and collectives are counted in it as often as they run. Writes
``results/replica_memory.json``. See README.md.
"""

from __future__ import annotations

import sys
from typing import Any

import _measure
import jax
import jax.numpy as jnp
import optax
from _transformer import LAYER_BYTES, LENGTH, SHAPES, TABLE, block, losses, model_bytes
from rich.console import Console
from rich.table import Table

import replicax
from replicax.hlo.collective_instructions import ProgramDevices, collectives_of
from replicax.hlo.instructions import parse

DEVICES, SEQUENCES, LAYERS = 4, 8, 12
MODEL_BYTES = model_bytes(LAYERS)


def compile_step(strategy: replicax.Strategy) -> replicax.Executable:
    """One training step with Adam, of a language model with a tied embedding, whose layers are one scan."""
    with strategy.scope():
        model = {"table": replicax.Variable(lambda: 0.1 * jnp.ones(TABLE), name="table")} | {
            name: replicax.Variable(lambda shape=shape: 0.1 * jnp.ones((LAYERS, *shape)), name=name)
            for name, shape in SHAPES.items()
        }
        optimizer = replicax.Optimizer(optax.adam(1e-3))

    def step(words: Any) -> None:
        def loss() -> Any:
            layers = {name: model[name].value for name in SHAPES}
            table = model["table"].value
            checkpointed = jax.checkpoint(block)
            x, _ = jax.lax.scan(lambda x, layer: (checkpointed(layer, x), None), table[words[:, :-1]], layers)
            return replicax.compute_average_loss(losses(table, x, words))

        _, gradients = replicax.value_and_grad(loss, model)()
        optimizer.apply_gradients(gradients, model)

    each = SEQUENCES * DEVICES // strategy.num_replicas_in_sync
    return strategy.extended.trace(step, args=(jax.ShapeDtypeStruct((each, LENGTH + 1), jnp.int32),))


def measure(strategy: replicax.Strategy) -> dict[str, Any]:
    program = compile_step(strategy)
    memory: Any = program.compiled().memory_analysis()
    sent: dict[str, float] = {}
    for use in collectives_of(parse(program.compiled_text()), ProgramDevices({"replica": DEVICES})):
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
