"""What it costs that workers agree on the elements of streams of their own.

    python benchmarks/workers_input.py [--quick]

Two workers on this machine go through streams of which nobody knows the length, in turn with an exchange for each
element and with exchanges about all that is ready. Prints a table, and writes ``results/workers_input.json``. There is
no bar: an exchange goes through processes that other work keeps waiting. See README.md.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import _measure
from _measure import Paired

LAUNCH = [sys.executable, "-c", "import sys; from replicax.cli import main; sys.exit(main())", "launch"]
WORKERS = 2
SHAPE = (64, 32)
"""Of an element of each worker: 8 KiB."""


def measure(rounds: int, elements: int) -> dict[str, Any]:
    """Times of an element, as one of the workers."""
    import numpy as np

    import replicax
    from replicax.data.batches import agreed_batches
    from replicax.workers.exchange import DistributedWorkers

    strategy = replicax.MultiWorkerMirroredStrategy()
    with strategy.scope():
        w = replicax.Variable(np.zeros(SHAPE[1], np.float32), name="w")
    batch = np.ones(SHAPE, np.float32)
    most, exchange, count = agreed_batches.MOST_AHEAD, DistributedWorkers.exchange, [0]

    def counted(self: Any, topic: str, *others: Any) -> Any:
        count[0] += ", element/" in topic
        return exchange(self, topic, *others)

    DistributedWorkers.exchange = counted  # type: ignore[method-assign]

    def step(x: Any) -> None:
        w.assign_add(replicax.get_replica_context().all_reduce("mean", x.mean(0)))

    def stream() -> Any:
        for _ in range(elements):
            yield batch

    dataset = strategy.distribute_datasets_from_function(lambda context: stream)

    def go(ahead: int, steps: bool) -> tuple[float, float]:
        """Seconds and exchanges of an element; each pass of the workers begins when all have come to it."""
        agreed_batches.MOST_AHEAD = ahead
        strategy.reduce("sum", strategy.distribute_values_from_function(lambda _: 1))
        count[0], start = 0, time.perf_counter()
        for element in dataset:
            if steps:
                strategy.run(step, args=(element,))
        w.numpy()
        return (time.perf_counter() - start) / elements, count[0] / elements

    results = []
    for steps in (False, True):
        go(0, steps), go(most, steps)
        sides: list[list[tuple[float, float]]] = [[], []]
        for number in range(rounds):
            order = ((0, 0), (1, most)) if number % 2 else ((1, most), (0, 0))
            for side, ahead in order:
                sides[side].append(go(ahead, steps))
        seconds = [[one for one, _ in side] for side in sides]
        exchanges = [sum(each for _, each in side) / rounds for side in sides]
        results.append({"steps": steps, **Paired(*seconds).summary(), "exchanges": exchanges})
    return {"elements": elements, "workers": WORKERS, "cases": results}


def show(results: dict[str, Any]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"The time of an element of {WORKERS} workers, in passes of {results['elements']}")
    for column in ("of each element", "an exchange for each", "exchanges about all that is ready", "ratio", "95%"):
        table.add_column(column, justify="right")
    for case in results["cases"]:
        one, several = case["exchanges"]
        low, high = case["ratio_95"]
        table.add_row(
            "a step, too" if case["steps"] else "nothing",
            f"{case['a_ms']:.2f} ms ({one:.2f} exchanges)",
            f"{case['b_ms']:.2f} ms ({several:.2f} exchanges)",
            f"{case['ratio']:.1f}",
            f"{low:.1f}–{high:.1f}",
        )
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a third of the time, and noisier")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        import jax

        results = measure(int(args.worker[0]), int(args.worker[1]))
        if jax.process_index() == 0:
            pathlib.Path(args.worker[2]).write_text(json.dumps(results))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "results.json")
        settings = ["--workers", str(WORKERS), "--max-restarts", "0", "--log-dir", f"{folder}/logs"]
        here = [__file__, "--worker", "4" if args.quick else "12", "200", str(path)]
        subprocess.run([*LAUNCH, *settings, *here], check=True)
        results = json.loads(path.read_text())
    show(results)
    _measure.write("workers_input.json", results)


if __name__ == "__main__":
    main()
