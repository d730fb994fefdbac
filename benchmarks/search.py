"""How good ``replicax plan --search`` is where that can be measured: on emulated devices, its pick beside the others.

    python benchmarks/search.py          # 24 cases: about ten minutes on two cores
    python benchmarks/search.py --quick  # 12 of them, in fewer rounds, and noisier

The search plans a small language model (``examples/language_model.py``) on eight emulated devices: placements ×
microbatches × recomputing layers. Then each of these cases trains, all in one process, a step of each in turn, so that
the noise of a busy machine falls on all alike. The quickest is chosen by every second round, and compared with the
search's first by the others, as the quickest of many has been lucky, too. The exit status is 1 if the step of the case
that the search has put first takes more than 1.1 times as long as that of the quickest, or if fewer than 12 cases were
measured. Prints a table, and writes ``results/search.json``. See docs/plan_search.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent))

import _measure
import numpy as np
from _steps import _wait

import replicax
from examples import language_model
from replicax.planning.global_batch import with_examples
from replicax.planning.strategy_spec import strategy_of

DEVICES = 8
PROGRAM = {"size": "tiny", "length": "64", "batch": "4", "dtype": "float32"}
CHOICES = ("strategy=mirrored,sharded,groups:2,groups:4", "microbatches=1,2,4", "remat=layers,none")
QUICK = ("strategy=mirrored,sharded,groups:4", "microbatches=1,2", "remat=layers,none")
ENOUGH = 12
BAR = 1.1


def searched(choices: tuple[str, ...]) -> dict[str, Any]:
    """What the search finds, as it writes it."""
    program = Path(language_model.__file__)
    options = [text for name, value in PROGRAM.items() for text in ("--with", f"{name}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, "-c", "import sys; from replicax.cli import main; sys.exit(main())", "plan"]
        command += [str(program), "--replicas", str(DEVICES), *options, "--search", *choices, "--json", str(found)]
        subprocess.run(command, check=True)
        searched: dict[str, Any] = json.loads(found.read_text())
    return searched


def training(case: dict[str, str], examples: int) -> Callable[[], None]:
    """A function that trains one step of a case, and returns when it is done."""
    strategy = strategy_of(devices=DEVICES, variables=case["strategy"], microbatches=int(case["microbatches"]))
    step, element = language_model.plan(
        strategy, PROGRAM["size"], int(PROGRAM["batch"]), int(PROGRAM["length"]), case["remat"], PROGRAM["dtype"]
    )
    element = with_examples(element, examples // strategy.num_replicas_in_sync)
    texts = np.random.default_rng(0).integers(0, 256, (examples, *element.shape[1:])).astype(np.int32)
    [batch] = strategy.distribute_dataset([texts])
    return lambda: _wait(strategy.run(step, args=(batch,)))


def measured(cases: list[dict[str, Any]], rounds: int) -> list[list[float]]:
    """The seconds of a step of each case, one entry for each round; the order changes from round to round."""
    calls = [training(row["case"], row["examples"]) for row in cases]
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    order = list(range(len(calls)))
    for turn in range(rounds):
        random.Random(turn).shuffle(order)
        for number in order:
            start = time.perf_counter()
            calls[number]()
            times[number].append(time.perf_counter() - start)
    return times


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="half of the cases, in fewer rounds, and noisier")
    parser.add_argument(
        "--found", type=Path, help="what replicax plan --search --json has written for the same choices"
    )
    options = parser.parse_args()
    rounds = 16 if options.quick else 60
    replicax.use_cpu_devices(DEVICES)
    found = (
        searched(QUICK if options.quick else CHOICES)
        if options.found is None
        else json.loads(options.found.read_text())
    )
    planned = [row for row in found["cases"] if row["state"] == "fits"]
    times = measured(planned, rounds)
    medians = [statistics.median(mine) for mine in times]
    # The quickest of many has been lucky, too: who it is tell the even rounds, and how quick it is the odd ones.
    even = [statistics.median(mine[::2]) for mine in times]
    best = even.index(min(even))
    pick = _measure.Paired(times[0][1::2], times[best][1::2])
    table = Table("strategy", "microbatches", "remat", "predicted", "measured", "measured / quickest")
    table.title = f"{len(planned)} cases in the order of the search; medians of {rounds} rounds"
    rows = []
    for row, mine in zip(planned, medians, strict=True):
        rows.append({**row["case"], "predicted_s": row["seconds"], "measured_s": mine, "bound_by": row["bound_by"]})
        cells = [f"{1e3 * row['seconds']:.1f} ms", f"{1e3 * mine:.1f} ms", f"{mine / medians[best]:.2f}"]
        table.add_row(*row["case"].values(), *cells)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    low, high = pick.interval
    compared = {"ratio": pick.ratio, "ratio_95": pick.interval, "quickest": planned[best]["case"]}
    _measure.write("search.json", {"devices": DEVICES, "rounds": rounds, **compared, "rows": rows})
    print(
        f"the search's first takes {pick.ratio:.2f} times as long as the quickest of {len(planned)} "
        f"(95%: {low:.2f} to {high:.2f})"
    )
    if len(planned) < ENOUGH or pick.ratio > BAR:
        sys.exit(f"expected at least {ENOUGH} cases, and at most {BAR} times as long")


if __name__ == "__main__":
    main()
