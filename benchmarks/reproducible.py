"""``reproducible=True``: whether the bits are the same, and what it costs.

    python benchmarks/reproducible.py --bits            # the proof; exit code 1 if any bit differs
    python benchmarks/reproducible.py --bits --quick    # the same with 4 steps
    python benchmarks/reproducible.py [--quick]         # the cost
    python benchmarks/reproducible.py --cases 'MLP:*' 'CNN:1-*'   # of some cases

The proof trains an MLP, the digits' CNN and a transformer with dropout, each with Adam or AdamW and clipping by the
global norm, as eight replicas: on 8, 4, 2 and 1 devices, with mirrored and with split variables, on one worker and on
two, without a break and through a checkpoint from which another placement goes on. Each placement is a process of its
own, with as many devices as it needs, or two. Compared are all bits of the parameters, of Adam's slots and of the
number of steps.

The cost is that of a step in a fixed order against one in the free order, called in turn. Cases are named
``model:devices-split`` and ``model:devices-mirrored``. Writes ``results/reproducible.json``, if all are measured. See
README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import _measure
import _trainings
import jax
from rich.console import Console
from rich.table import Table

import replicax
from replicax.devices.cpu_arithmetic import FLAG, fix_arithmetic

LAUNCH = [sys.executable, "-c", "import sys; from replicax.cli import main; sys.exit(main())", "launch"]
REPLICAS = 8
BAR = 1.10


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where eight replicas run.

    Attributes:
      devices: of all workers.
      workers: how many there are.
      split: whether variables are split over the devices.
    """

    devices: int
    workers: int = 1
    split: bool = False

    def __str__(self) -> str:
        workers = f" of {self.workers} workers" if self.workers > 1 else ""
        return f"{self.devices} device(s){workers}, {'split' if self.split else 'mirrored'}"

    @property
    def code(self) -> str:
        """The same for a command line."""
        return f"{self.devices},{self.workers},{int(self.split)}"

    @classmethod
    def of(cls, code: str) -> Placement:
        devices, workers, split = map(int, code.split(","))
        return cls(devices, workers, bool(split))

    def strategy(self, reproducible: bool = True) -> replicax.Strategy:
        """That of this process, which has made no devices yet, or is a worker."""
        if self.split:
            return replicax.ShardedStrategy(num_replicas=REPLICAS, reproducible=reproducible)
        kind = replicax.MirroredStrategy if self.workers == 1 else replicax.MultiWorkerMirroredStrategy
        return kind(num_replicas=REPLICAS, reproducible=reproducible)


PLACEMENTS = [Placement(devices, split=split) for split in (False, True) for devices in (8, 4, 2, 1)]
PLACEMENTS += [Placement(devices, 2, split) for split in (False, True) for devices in (8, 2)]
RESTARTS = [
    (Placement(8), Placement(2, split=True)),
    (Placement(4, split=True), Placement(1)),
    (Placement(2), Placement(8, split=True)),
    (Placement(1), Placement(2, 2)),
    (Placement(8, 2, True), Placement(4)),
]
"""From where to where."""


# --- the same bits --------------------------------------------------------------------------------------


def train(placement: Placement, steps: int, checkpoints: str, goes_on: bool, out: str) -> None:
    """What one process does: train each model, and write the digests of its variables."""
    if placement.workers == 1:
        replicax.use_cpu_devices(placement.devices)
    strategy, digests = placement.strategy(), {}
    for name in _trainings.MODELS:
        training = _trainings.Training.of(name, strategy)
        path = f"{checkpoints}/{name}"
        if goes_on:
            training.checkpoint.restore(path)
        else:
            training.go(0, steps // 2)
            training.checkpoint.save(path)
        training.go(steps // 2, steps)
        digests[name] = training.digest()
    if jax.process_index() == 0:
        pathlib.Path(out).write_text(json.dumps(digests))


def digests_of(placement: Placement, steps: int, checkpoints: pathlib.Path, goes_on: bool) -> dict[str, str]:
    """What :func:`train` finds, in processes of its own."""
    checkpoints.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/digests.json"
        script = [__file__, f"--train={placement.code}", f"--steps={steps}", f"--checkpoints={checkpoints}"]
        script += [f"--out={out}", *(["--goes-on"] if goes_on else [])]
        command = [sys.executable, *script]
        if placement.workers > 1:
            each = placement.devices // placement.workers
            options = [f"--workers={placement.workers}", f"--devices-per-worker={each}", "--max-restarts=0"]
            command = [*LAUNCH, *options, f"--log-dir={folder}/logs", *script]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the training on {placement} failed with exit code {done.returncode}:\n{done.stdout}")
        found: dict[str, str] = json.loads(pathlib.Path(out).read_text())
        return found


def prove(steps: int) -> bool:
    """Print a row for each placement; whether all bits are the same."""
    console = Console(width=120, highlight=False)
    console.print(f"The bits after {steps} steps of {REPLICAS} replicas (digests)", style="bold")
    console.print(f"{'':64}" + "".join(f"{name:18}" for name in _trainings.MODELS))
    first: dict[str, str] = {}
    same = True

    def add(what: str, digests: dict[str, str]) -> None:
        nonlocal first, same
        first = first or digests
        alike = {name: digest == first[name] for name, digest in digests.items()}
        same = same and all(alike.values())
        cells = (digest if alike[name] else f"[red]{digest}[/]" for name, digest in digests.items())
        console.print(f"{what:64}" + "  ".join(cells))

    with tempfile.TemporaryDirectory() as folder:
        for placement in PLACEMENTS:
            add(str(placement), digests_of(placement, steps, pathlib.Path(folder, placement.code), goes_on=False))
        for before, after in RESTARTS:
            path = pathlib.Path(folder, before.code)
            add(f"{before}; then {after}", digests_of(after, steps, path, goes_on=True))
    console.print("All bits are the same." if same else "[red]Some bits differ from those of the first row.[/]")
    return same


# --- what it costs --------------------------------------------------------------------------------------


COSTS = [Placement(8), Placement(2), Placement(1), Placement(8, split=True), Placement(2, split=True)]
"""Where the cost is measured."""


def case_of(model: str, placement: Placement) -> str:
    """Its name."""
    return f"{model}:{placement.devices}-{'split' if placement.split else 'mirrored'}"


def cost_here(placement: Placement, models: list[str], seconds: float) -> list[dict[str, Any]]:
    """Times of a step in a fixed order (A) and in the free order (B), of each model."""
    fix_arithmetic(REPLICAS)  # for both
    replicax.use_cpu_devices(placement.devices)
    found = []
    for name in models:
        calls = []
        for reproducible in (True, False):
            training = _trainings.Training.of(name, placement.strategy(reproducible))
            [batch] = training.batches(0, 1)

            def call(training: _trainings.Training = training, batch: Any = batch) -> None:
                training.strategy.run(training.step, args=(batch,))
                jax.block_until_ready([v.value for v in training.variables])

            calls.append(call)
        paired = _measure.Paired(*_measure.interleave(calls, seconds, warmup=5))
        found.append({"model": name, "devices": placement.devices, "split": placement.split, **paired.summary()})
    return found


def measure(seconds: float, wanted: list[str]) -> dict[str, Any]:
    """Print the table of costs, of the cases that one of the patterns names."""
    cases: list[dict[str, Any]] = []
    for placement in COSTS:
        named = [m for m in _trainings.MODELS if any(fnmatch.fnmatch(case_of(m, placement), w) for w in wanted)]
        if named:
            options = f"--cost={placement.code}", f"--models={','.join(named)}", f"--seconds={seconds}"
            cases += _measure.in_subprocess("reproducible.py", *options)
    if not cases:
        raise SystemExit(
            f"no case is named {' or '.join(wanted)}: {[case_of(m, p) for p in COSTS for m in _trainings.MODELS]}"
        )
    table = Table(title=f"A step of 8 replicas: reproducible (A), and in the free order (B); bar {BAR:.2f}")
    for column in ("model", "placement", "A", "B", "A / B", "95%"):
        table.add_column(column, justify="left" if column in ("model", "placement") else "right")
    for case in cases:
        low, high = case["ratio_95"]
        table.add_row(
            case["model"],
            str(Placement(case["devices"], split=case["split"])),
            f"{case['a_ms']:.2f} ms",
            f"{case['b_ms']:.2f} ms",
            f"{case['ratio']:.2f}",
            f"{low:.2f}–{high:.2f}",
        )
    Console(width=110, highlight=False).print(table)
    return {"bar": BAR, "flag": FLAG, "cases": cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", action="store_true", help="the proof instead of the cost")
    parser.add_argument("--quick", action="store_true", help="fewer steps, or less time")
    parser.add_argument(
        "--cases", nargs="+", metavar="PATTERN", help="of which the cost is measured, such as 'MLP:8-*'"
    )
    for hidden in ("--train", "--cost", "--models", "--checkpoints", "--out"):  # of a process of this benchmark
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--goes-on", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    # Dtypes mix in Optax's Adam.
    with jax.numpy_dtype_promotion("standard"):
        if options.train:
            train(Placement.of(options.train), options.steps, options.checkpoints, options.goes_on, options.out)
        elif options.cost:
            print(json.dumps(cost_here(Placement.of(options.cost), options.models.split(","), options.seconds)))
        elif options.bits:
            sys.exit(0 if prove(4 if options.quick else 20) else 1)
        else:
            costs = measure(3 if options.quick else 20, options.cases or ["*"])
            if not options.cases:
                _measure.write("reproducible.json", costs)


if __name__ == "__main__":
    main()
