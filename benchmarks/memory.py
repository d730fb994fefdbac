"""What a device holds of a 24-layer transformer, and what it is sent in a step: on many placements.

    python benchmarks/memory.py              # all of it
    python benchmarks/memory.py 4x2/2 8x1/8  # some of its rows, and the table with the others from the last run
    python benchmarks/memory.py --joined 8x1/1  # as the compiler for CPUs does it by default

Variables are mirrored, split over all replicas, or within groups of them; a replica has one device, or several, which
share out heads and hidden units; and the devices are those of one process, or of two workers. Prints a table from
the compiled programs' own memory analysis and collectives, and writes ``results/memory.json``; exits with 1 if a bar is
missed. See README.md.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import _measure
import jax
import jax.numpy as jnp
import optax
from _transformer import LAYER_BYTES, LENGTH, SHAPES, TABLE, block, losses, model_bytes

import replicax
from replicax.devices.mesh import REPLICA_AXIS
from replicax.hlo import collective_instructions
from replicax.hlo.instructions import parse

LAUNCH = [sys.executable, "-c", "import sys; from replicax.cli import main; sys.exit(main())", "launch"]
LAYERS, BATCH = 24, 1
MODEL_BYTES = model_bytes(LAYERS)
# The dim along which a replica's devices share out a parameter: heads, hidden units, and the embedding's width.
SPLIT = {"qkv": 1, "out": 0, "up": 1, "down": 0, "table": 1}


@dataclasses.dataclass(frozen=True)
class Placement:
    """So many replicas of so many devices each.

    Attributes:
      group: over how many replicas variables are split; 1 if they are mirrored.
      workers: how many processes have the devices.

    Its name has these three: ``"4x2/2"``, and ``"4x2/2 on 2"`` if there are several workers.
    """

    replicas: int
    logical: int
    group: int
    workers: int = 1

    @property
    def name(self) -> str:
        return f"{self.replicas}x{self.logical}/{self.group}" + (f" on {self.workers}" if self.workers > 1 else "")

    @property
    def words(self) -> str:
        on = f", {self.workers} workers" if self.workers > 1 else ""
        if self.group == 1:
            return "mirrored" + on
        return ("split" if self.group == self.replicas else f"split in {self.replicas // self.group} groups") + on

    def strategy(self) -> replicax.Strategy:
        devices = [f"cpu:{i}" for i in range(self.replicas * self.logical // self.workers)]
        if self.group == 1:
            return replicax.MultiWorkerMirroredStrategy(devices, num_logical_devices=self.logical)
        groups = None if self.group == self.replicas else replicax.variables.GroupPartitioner(self.group)
        return replicax.ShardedStrategy(devices, variable_partitioner=groups, num_logical_devices=self.logical)

    def fewest(self) -> dict[str, float]:
        """What the collectives between replicas bring a device at least, as shares of the model.

        Of what its logical device has, the whole is gathered twice, for the forward and the backward pass. The sum of
        the gradient is brought in pieces by the group, and then across groups; or whole, if nothing is split. Between
        processes CPUs have no reduce-scatter that can be relied on, so the sum is brought whole there, too.
        """
        part = 1 / self.logical
        if self.group == 1:
            return {"all-reduce": part}
        if self.workers > 1:
            return {"all-gather": 2 * part, "all-reduce": part}
        across = {"all-reduce": part / self.group} if self.group < self.replicas else {}
        return {"all-gather": 2 * part, "reduce-scatter": part / self.group, **across}


PLACEMENTS = [
    Placement(8, 1, 1),
    *(Placement(replicas, 1, replicas) for replicas in (2, 4, 8)),
    *(Placement(8, 1, group) for group in (2, 4)),
    *(Placement(8 // logical, logical, 1) for logical in (2, 4)),
    *(Placement(8 // logical, logical, 8 // logical) for logical in (2, 4)),
    Placement(4, 2, 2),
    *(Placement(8, 1, group, workers=2) for group in (1, 8, 4)),
    *(Placement(4, 2, group, workers=2) for group in (4, 2)),
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
    uses = collective_instructions.collectives_of(
        parse(compiled.as_text() or ""), collective_instructions.ProgramDevices(dict(strategy.extended.mesh.shape))
    )
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
        "workers": placement.workers,
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


def measure_on_workers(wanted: list[str], workers: int) -> list[dict[str, Any]]:
    """What the chief of so many workers, which the launcher starts, has measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "rows.json")
        sizes = ["--workers", str(workers), "--devices-per-worker", str(8 // workers), "--hang-timeout", "0"]
        launch = [*LAUNCH, *sizes, "--show", "none", "--log-dir", folder]
        subprocess.run([*launch, __file__, *wanted, "--as-worker", str(path)], check=True)
        rows: list[dict[str, Any]] = json.loads(path.read_text())
        return rows


def work(placements: list[Placement], path: pathlib.Path) -> None:
    """Measure as one of several workers."""
    rows = []
    for placement in placements:
        rows.append(measure(placement))
        print(rows[-1]["name"], flush=True)
    if jax.process_index() == 0:
        path.write_text(json.dumps(rows))


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
    parser.add_argument("--as-worker", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    wanted = args.rows
    if unknown := set(wanted) - set(names):
        parser.error(f"there are no rows {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    # Buffers and collectives are settled before machine code is made, so that may be made in a hurry. And the compiler
    # for CPUs would make one of all the all-reduces of mirrored variables, for which all gradients must be there at
    # once; the others join them up to a size. (Of split variables Replicax itself leaves them apart.)
    apart = "" if args.joined else " --xla_disable_hlo_passes=cpu-all-reduce-combiner"
    flags = f"--xla_backend_optimization_level=0{apart}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    if args.as_worker is not None:
        return work([placement for placement in PLACEMENTS if placement.name in wanted], args.as_worker)
    replicax.use_cpu_devices(8)
    path = _measure.RESULTS / "memory.json"
    found = {row["name"]: row for row in json.loads(path.read_text())["rows"]} if wanted and not args.joined else {}
    chosen = [placement for placement in PLACEMENTS if not wanted or placement.name in wanted]
    for placement in chosen:
        if placement.workers == 1:
            found[placement.name] = measure(placement)
    for workers in sorted({placement.workers for placement in chosen if placement.workers > 1}):
        together = [placement.name for placement in chosen if placement.workers == workers]
        found |= {row["name"]: row for row in measure_on_workers(together, workers)}
    rows = [found[name] for name in names if name in found]
    show(rows)
    if args.joined:
        return
    _measure.write("memory.json", {"model_bytes": MODEL_BYTES, "layer_bytes": LAYER_BYTES, "rows": rows})
    sys.exit(not all(map(is_met, rows)))


if __name__ == "__main__":
    main()
