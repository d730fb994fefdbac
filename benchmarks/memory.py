"""What a device holds of a 24-layer transformer, and what it is sent in a step: on many placements.

    python benchmarks/memory.py              # all of it
    python benchmarks/memory.py 4x2/2 8x1/8  # some of its rows, and the table with the others from the last run
    python benchmarks/memory.py --joined 4x2/2  # as the compiler for CPUs does it by default

Variables are mirrored, split over all replicas, or within groups of them; and a replica has one device, or several,
which share out heads and hidden units. Prints a table from the compiled programs' own memory analysis and collectives,
and writes ``results/memory.json``; exits with 1 if a bar is missed. See README.md.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import sys
from typing import Any

import _measure
import jax
import jax.numpy as jnp
import optax
from _transformer import LAYER_BYTES, LENGTH, SHAPES, TABLE, block, losses, model_bytes

import replicax
from replicax.devices.mesh import REPLICA_AXIS
from replicax.hlo.collective_instructions import collectives_of
from replicax.hlo.instructions import parse

LAYERS, BATCH = 24, 1
MODEL_BYTES = model_bytes(LAYERS)
# The dim along which a replica's devices share out a parameter: heads, hidden units, and the embedding's width.
SPLIT = {"qkv": 1, "out": 0, "up": 1, "down": 0, "table": 1}


@dataclasses.dataclass(frozen=True)
class Placement:
    """So many replicas of so many devices each.

    Attributes:
      group: over how many replicas variables are split; 1 if they are mirrored.

    Its name has these three: ``"4x2/2"``.
    """

    replicas: int
    logical: int
    group: int

    @property
    def name(self) -> str:
        return f"{self.replicas}x{self.logical}/{self.group}"

    @property
    def words(self) -> str:
        if self.group == 1:
            return "mirrored"
        return "split" if self.group == self.replicas else f"split in {self.replicas // self.group} groups"

    def strategy(self) -> replicax.Strategy:
        devices = [f"cpu:{i}" for i in range(self.replicas * self.logical)]
        if self.group == 1:
            return replicax.MirroredStrategy(devices, num_logical_devices=self.logical)
        groups = None if self.group == self.replicas else replicax.GroupPartitioner(self.group)
        return replicax.ShardedStrategy(devices, variable_partitioner=groups, num_logical_devices=self.logical)

    def fewest(self) -> dict[str, float]:
        """What the collectives between replicas bring a device at least, as shares of the model.

        Of what its logical device has, the whole is gathered twice, for the forward and the backward pass. The sum of
        the gradient is brought in pieces by the group, and then across groups; or whole, if nothing is split.
        """
        part = 1 / self.logical
        if self.group == 1:
            return {"all-reduce": part}
        across = {"all-reduce": part / self.group} if self.group < self.replicas else {}
        return {"all-gather": 2 * part, "reduce-scatter": part / self.group, **across}


PLACEMENTS = [
    Placement(8, 1, 1),
    *(Placement(replicas, 1, replicas) for replicas in (2, 4, 8)),
    *(Placement(8, 1, group) for group in (2, 4)),
    *(Placement(8 // logical, logical, 1) for logical in (2, 4)),
    *(Placement(8 // logical, logical, 8 // logical) for logical in (2, 4)),
    Placement(4, 2, 2),
]


def compile_step(strategy: replicax.Strategy) -> replicax.Executable:
    """One training step with Adam, of a language model with a tied embedding."""
    logical = strategy.extended.num_logical_devices

    def variable(name: str, shape: tuple[int, ...]) -> replicax.Variable:
        parts = [logical if dim == SPLIT.get(name) else 1 for dim in range(len(shape))] if name in SPLIT else None
        return replicax.Variable(lambda: 0.1 * jnp.ones(shape), name=name, partition_dimensions=parts)

    with strategy.scope():
        table = variable("table", TABLE)
        layers = [{name: variable(name, shape) for name, shape in SHAPES.items()} for _ in range(LAYERS)]
        optimizer = replicax.Optimizer(optax.adam(1e-3))
    variables = [table, *(v for layer in layers for v in layer.values())]

    def step(words: Any) -> None:
        def loss() -> Any:
            x = table.value[words[:, :-1]]
            for layer in layers:
                x = jax.checkpoint(lambda x, layer=layer: block(layer | {"scales": layer["scales"].value}, x))(x)
            return replicax.compute_average_loss(losses(table.value, x, words))

        _, gradients = replicax.value_and_grad(loss, variables)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    words = jnp.zeros((BATCH, LENGTH + 1), jnp.int32)
    batch = strategy.distribute_values_from_function(lambda ctx: words + ctx.replica_id_in_sync_group)
    return strategy.extended.trace(step, args=(batch,))


def measure(placement: Placement) -> dict[str, Any]:
    strategy = placement.strategy()
    program = compile_step(strategy)
    compiled = program.compiled()
    memory: Any = compiled.memory_analysis()
    uses = collectives_of(parse(compiled.as_text() or ""), dict(strategy.extended.mesh.shape))
    counts, between = collections.Counter[str](), collections.Counter[str]()
    within = 0
    for use in uses:
        if REPLICA_AXIS in use.axes:
            counts[use.kind] += use.count
            between[use.kind] += use.count * use.bytes
        else:
            within += use.count * use.bytes
    return {
        "name": placement.name,
        "placement": placement.words,
        "replicas": placement.replicas,
        "logical_devices": placement.logical,
        "group": placement.group,
        "kept": memory.argument_size_in_bytes / (3 * MODEL_BYTES),
        "kept_at_least": 1 / (placement.group * placement.logical),
        "temporaries": memory.temp_size_in_bytes / MODEL_BYTES,
        "temporaries_in_layers": memory.temp_size_in_bytes / LAYER_BYTES,
        "collectives": counts,
        "bytes": {kind: size / MODEL_BYTES for kind, size in sorted(between.items())},
        "fewest": placement.fewest(),
        "bytes_within_a_replica": within / MODEL_BYTES,
    }


def is_met(row: dict[str, Any]) -> bool:
    """Whether a device keeps no more than its share, and is sent no more than it must be.

    But for the norms' scales, 0.2% of the model, which a replica's devices don't share out.
    """
    sent = all(size <= row["fewest"].get(kind, 0) + 0.003 for kind, size in row["bytes"].items())
    few = row["group"] == 1 or row["temporaries_in_layers"] < 6
    return row["kept"] <= 1.01 * row["kept_at_least"] and sent and few


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "", "replicas × devices", "kept", "temporaries", "in layers", "between replicas", "fewest", "within", ""
    )
    table.title = f"One device, a training step of {LAYERS} layers; sizes as shares of the model"
    for row in rows:
        table.add_row(
            row["placement"],
            f"{row['replicas']} × {row['logical_devices']}",
            f"{row['kept']:.3f}",
            f"{row['temporaries']:.3f}",
            f"{row['temporaries_in_layers']:.1f}",
            "\n".join(f"{row['collectives'][kind]} {kind}: {size:.3f}" for kind, size in row["bytes"].items()),
            "\n".join(f"{row['fewest'].get(kind, 0):.3f}" for kind in row["bytes"]),
            f"{row['bytes_within_a_replica']:.3f}",
            "pass" if is_met(row) else "MISS",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [placement.name for placement in PLACEMENTS]
    parser.add_argument("rows", nargs="*", metavar="row", help=f"which to measure: {', '.join(names)}")
    parser.add_argument("--joined", action="store_true", help="leave all-reduces to the compiler, and write nothing")
    args = parser.parse_args()
    wanted = args.rows
    if unknown := set(wanted) - set(names):
        parser.error(f"there are no rows {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    # Buffers and collectives are settled before machine code is made, so that may be made in a hurry. And the compiler
    # for CPUs would make one of all the all-reduces between groups, for which the pieces of all gradients must be there
    # at once; the others join them up to a size.
    apart = "" if args.joined else " --xla_disable_hlo_passes=cpu-all-reduce-combiner"
    flags = f"--xla_backend_optimization_level=0{apart}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    replicax.use_cpu_devices(8)
    path = _measure.RESULTS / "memory.json"
    found = {row["name"]: row for row in json.loads(path.read_text())["rows"]} if wanted and not args.joined else {}
    for placement in PLACEMENTS:
        if not wanted or placement.name in wanted:
            found[placement.name] = measure(placement)
    rows = [found[name] for name in names if name in found]
    show(rows)
    if args.joined:
        return
    _measure.write("memory.json", {"model_bytes": MODEL_BYTES, "layer_bytes": LAYER_BYTES, "rows": rows})
    sys.exit(not all(map(is_met, rows)))


if __name__ == "__main__":
    main()
