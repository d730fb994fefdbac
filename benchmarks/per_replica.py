"""What the per-replica executor costs, against the compiled step.

    python benchmarks/per_replica.py [--quick]

Prints a table, writes ``results/per_replica.json``, and exits with 1 if a bar is missed. See README.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _measure
from _measure import Paired

REPLICAS = 4
ROUNDS = 1
CALLS = 200
"""How often each step is made on either executor, in turn."""
HUNDREDTH = 99
RATIO = 40.0
FIRST = 10.0
"""Seconds for the first call of the CNN, on two cores."""
SAMPLES = 16
"""How often its memory is measured meanwhile."""
GROWTH = 0.02
"""How much more memory a process may have after the calls, as a share."""
CASES = {"cnn": "step of the digits' CNN", "mlp": "step of an MLP, Adam"}


# --- one process ----------------------------------------------------------------------------------------


def measure_here(case: int, _turn: int, share: float) -> dict[str, Any]:
    import jax

    import replicax

    replicax.use_cpu_devices(REPLICAS)
    strategy = replicax.MirroredStrategy()
    step, batch = (_cnn, _mlp)[case](strategy)
    exactly = replicax.RunOptions(executor="per_replica")
    compiled: list[float] = []

    def note(event: str, seconds: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(note)

    def call(options: Any) -> None:
        jax.block_until_ready(strategy.local_results(strategy.run(step, args=(batch,), options=options)))

    def timed(options: Any) -> tuple[float, int]:
        before, start = len(compiled), time.perf_counter()
        call(options)
        return time.perf_counter() - start, len(compiled) - before

    first, second = timed(exactly), timed(exactly)
    _, in_between = timed(None)
    before, count = len(compiled), max(20, int(CALLS * share))
    exact_times, compiled_times = [first[0], second[0]], []
    memory: list[int] = []
    arrays: list[int] = []
    while len(exact_times) < count:
        if len(exact_times) % 2:
            compiled_times.append(timed(None)[0])
            exact_times.append(timed(exactly)[0])
        else:
            exact_times.append(timed(exactly)[0])
            compiled_times.append(timed(None)[0])
        if len(exact_times) % (count // SAMPLES) == 0:
            gc.collect()
            memory.append(_resident())
            arrays.append(len(jax.live_arrays()))
    return {
        "first_s": first[0],
        "second_s": second[0],
        "hundredth_s": exact_times[HUNDREDTH] if count > HUNDREDTH else None,
        "compilations": {
            "first": first[1],
            "second": second[1],
            "of the compiled step": in_between,
            "later": len(compiled) - before,
        },
        "exact": exact_times[2:],
        "compiled": compiled_times,
        "calls": count,
        # The least of some: now and then, XLA's threads hold more for a while.
        "memory": [min(memory[SAMPLES // 4 : SAMPLES // 2]), min(memory[-SAMPLES // 4 :])],
        "arrays": [arrays[0], arrays[-1]],
    }


def _resident() -> int:
    """The bytes of this process that are in memory, without those that malloc keeps for later, up to twice as many.

    How many it keeps depends on which of XLA's threads has happened to free what.
    """
    with contextlib.suppress(AttributeError, OSError):  # other C libraries have no such function
        ctypes.CDLL(None).malloc_trim(0)
    text = Path("/proc/self/statm").read_text()
    return int(text.split()[1]) * 4096


def _cnn(strategy: Any) -> tuple[Callable[..., Any], Any]:
    import numpy as np

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import digits

    with strategy.scope():
        _, step, _ = digits.build(seed=0, steps=1000)
    rng = np.random.default_rng(0)
    images = rng.random((digits.BATCH, 8, 8, 1), np.float32)
    labels = rng.integers(10, size=digits.BATCH).astype(np.int32)
    [batch] = strategy.distribute_dataset([(images, labels)])
    return step, batch


def _mlp(strategy: Any) -> tuple[Callable[..., Any], Any]:
    import _steps

    problem = _steps.mlp()
    step, _, _ = _steps.replicax_step(strategy, problem)
    [batch] = strategy.distribute_dataset([problem.batch])
    return step, batch


# --- all of them ----------------------------------------------------------------------------------------


def measure(rounds: int, share: float) -> dict[str, Any]:
    cases = []
    for number, (name, title) in enumerate(CASES.items()):
        parts = [
            _measure.in_subprocess(
                "per_replica.py", "--devices", str(number), "--turn", str(turn), "--share", str(share)
            )
            for turn in range(rounds)
        ]
        paired = Paired([t for p in parts for t in p["exact"]], [t for p in parts for t in p["compiled"]])
        first = min(p["first_s"] for p in parts)
        growth = max(p["memory"][1] / p["memory"][0] - 1 for p in parts)
        again = max(p["compilations"]["second"] + p["compilations"]["later"] for p in parts)
        cases.append(
            {
                "name": name,
                "title": title,
                **paired.summary(),
                "first_s": first,
                "second_s": min(p["second_s"] for p in parts),
                "hundredth_s": parts[0]["hundredth_s"],
                "compilations": parts[0]["compilations"],
                "compiled_again": again,
                "calls": parts[0]["calls"],
                "memory_mb": [m / 1e6 for m in parts[0]["memory"]],
                "growth": growth,
                "arrays": parts[0]["arrays"],
                "passed": {
                    "ratio": paired.ratio <= RATIO,
                    "first": name != "cnn" or first <= FIRST,
                    "compilations": again == 0,
                    "memory": growth <= GROWTH,
                    "arrays": len(set(parts[0]["arrays"])) == 1,
                },
            }
        )
    return {"replicas": REPLICAS, "cases": cases}


def show(results: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"The per-replica executor on {results['replicas']} replicas, against the compiled step")
    table.add_column("")
    for case in results["cases"]:
        table.add_column(case["title"], justify="right", no_wrap=True)
    table.add_column("bar", justify="right", no_wrap=True)

    def row(title: str, text: Callable[[dict[str, Any]], str], bar: str = "", check: str | None = None) -> None:
        cells = []
        for case in results["cases"]:
            passed = check is None or case["passed"][check]
            cells.append(text(case) if passed else f"[bold red]{text(case)} FAIL[/]")
        table.add_row(title, *cells, bar)

    row("compiled step", lambda c: f"{c['b_ms']:.1f} ms")
    row("exact step", lambda c: f"{c['a_ms']:.0f} ms")
    row("exact / compiled", lambda c: f"{c['ratio']:.1f}", f"≤ {RATIO:.0f}", "ratio")
    row("  95%", lambda c: "{:.1f}–{:.1f}".format(*c["ratio_95"]))
    row("first call", lambda c: f"{c['first_s']:.1f} s", f"≤ {FIRST:.0f} s (CNN)", "first")
    row("second call", lambda c: f"{c['second_s']:.2f} s")
    row("hundredth call", lambda c: "" if c["hundredth_s"] is None else f"{c['hundredth_s']:.2f} s")
    row("compilations of the first", lambda c: str(c["compilations"]["first"]))
    row("  of the second", lambda c: str(c["compilations"]["second"]))
    row("  of later calls", lambda c: str(c["compiled_again"]), "0", "compilations")
    row(
        "memory in the calls' second quarter, and last",
        lambda c: "{:.0f} → {:.0f} MB".format(*c["memory_mb"]),
        f"≤ {GROWTH:+.0%}",
        "memory",
    )
    row("arrays alive", lambda c: "{} → {}".format(*c["arrays"]), "equal", "arrays")
    row("calls", lambda c: str(c["calls"]))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main() -> None:
    description = "What the per-replica executor costs, against the compiled step."
    results = _measure.measured(description, "a quarter", measure_here, measure, ROUNDS, quick_share=0.25)
    show(results)
    _measure.write("per_replica.json", results)
    sys.exit(not all(all(case["passed"].values()) for case in results["cases"]))


if __name__ == "__main__":
    main()
