"""What Replicax costs, against hand-written ``jit(shard_map)``.

    python benchmarks/overhead.py [--quick]

Prints a table, writes ``results/overhead.json``, and exits with 1 if a bar is missed. See README.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import _measure
import first_call
import import_time
from _measure import Paired

if TYPE_CHECKING:
    from rich.table import Column

ROUNDS = 4
"""Each case is measured in that many processes: where memory happens to lie makes up to 2% in each."""


@dataclasses.dataclass(frozen=True)
class Case(_measure.Case):
    """One step to compare, on several numbers of devices.

    Attributes:
      devices: on how many to run it.
    """

    devices: tuple[int, ...]


CASES = (
    Case("mlp", "step of an MLP, Adam", 1.03, 6.0, (1, 2, 8)),
    Case("variables", "200 variables + 1", 1.15, 3.0, (1, 2, 8)),
    Case("small_gradients", "step with 100 small gradients", 0.50, 4.0, (4,)),
    Case("small_layers", "step of 100 small layers", None, 4.0, (4,)),
)


# --- one process ----------------------------------------------------------------------------------------


def measure_here(devices: int, turn: int, share: float) -> dict[str, Any]:
    """Measure every case that runs on ``devices`` devices, in this process."""
    import replicax

    replicax.use_cpu_devices(devices)

    import _steps

    sides: dict[str, tuple[Callable[[], _steps.Side], Callable[[], _steps.Side]]] = {
        "mlp": _both(_steps, _steps.mlp),
        "variables": (_steps.count_replicax, _steps.count_by_hand),
        "small_gradients": _both(_steps, _steps.small_gradients),
        "small_layers": _both(_steps, _steps.small_layers),
    }
    results = {}
    for case in CASES:
        if devices in case.devices:
            make_ours, make_theirs = sides[case.name]
            if turn % 2:  # neither side is always the one that is made first
                theirs = make_theirs()
                ours = make_ours()
            else:
                ours = make_ours()
                theirs = make_theirs()
            times = _measure.interleave([ours.call, theirs.call], case.seconds * share)
            results[case.name] = {
                "times": times,
                "traces": [ours.traces(), theirs.traces()],
                "all_reduces": [_in_numbers(side.collectives()) for side in (ours, theirs)],
                "difference": _difference(ours.state(), theirs.state()),
            }
    return results


def _both(steps: Any, problem: Callable[[], Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    return lambda: steps.train_replicax(problem()), lambda: steps.train_by_hand(problem())


def _in_numbers(collectives: Any) -> list[list[Any]]:
    return [[c.kind, c.bytes, c.arrays] for c in collectives]


def _difference(ours: Any, theirs: Any) -> float:
    """The largest difference between the parameters after as many steps, relative to the largest of them."""
    largest = max(float(abs(b).max()) for b in theirs)
    return max(float(abs(a - b).max()) for a, b in zip(ours, theirs, strict=True)) / largest


# --- all of them ----------------------------------------------------------------------------------------


def measure(rounds: int, share: float) -> dict[str, Any]:
    """Measure everything; every number of devices in processes of its own."""
    runs: dict[tuple[str, int], list[Any]] = {}
    counts = sorted(set(itertools.chain.from_iterable(case.devices for case in CASES)))
    for turn in range(rounds):
        for devices in counts:
            arguments = ["--devices", str(devices), "--turn", str(turn), "--share", str(share)]
            for name, result in _measure.in_subprocess("overhead.py", *arguments).items():
                runs.setdefault((name, devices), []).append(result)
    cases = [_summary(case, devices, runs[case.name, devices]) for case in CASES for devices in case.devices]
    imported = import_time.measure(pairs=max(5, round(15 * share)))
    imported["passed"] = imported["longer_s"] <= import_time.BAR
    first = first_call.measure(layers=16, devices=4, cached=False, pairs=rounds)
    return {"cases": cases, "import": imported, "first_call": first, "rounds": rounds}


def _summary(case: Case, devices: int, results: list[Any]) -> dict[str, Any]:
    rounds = [Paired(*r["times"]) for r in results]
    together = _measure.of_all_processes([r["times"] for r in results])
    last = results[-1]
    same = {
        "traces": last["traces"],
        "collectives": [len(side) for side in last["all_reduces"]],
        "bytes": [sum(size for _, size, _ in side) for side in last["all_reduces"]],
        "arrays": [sum(arrays for *_, arrays in side) for side in last["all_reduces"]],
        "difference": max(r["difference"] for r in results),
    }
    return {
        "case": case.name,
        "title": case.title,
        "devices": devices,
        "bar": case.bar,
        **together.summary(),
        "ratio_by_round": [r.ratio for r in rounds],
        "passed": case.bar is None or together.ratio <= case.bar,
        **same,
        "same_program": all(r["traces"] == [1, 1] for r in results)
        and _same_collectives(last["all_reduces"], devices)
        and same["difference"] < 1e-3,
    }


def _same_collectives(both: list[Any], devices: int) -> bool:
    """Whether both programs have as many collectives, of as many bytes; on one device ours may have none."""
    ours, theirs = ((len(side), sum(size for _, size, _ in side)) for side in both)
    return ours == theirs or (devices == 1 and ours == (0, 0))


def show(results: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    speed = Table("", *_right("devices", "Replicax", "by hand", "ratio", "95%", "bar"), "")
    speed.title = "Time of a call, until its results are there: medians, and the median of paired ratios"
    same = Table("", *_right("devices", "traces", "collectives", "arrays", "bytes", "difference"), "")
    same.title = "The same program? Replicax / by hand"
    for case in results["cases"]:
        name, devices = case["title"], str(case["devices"])
        speed.add_row(name, devices, *_measure.cells(case, case["bar"], case["passed"]))
        pairs = ("{:,} / {:,}".format(*case[what]) for what in ("traces", "collectives", "arrays", "bytes"))
        same.add_row(name, devices, *pairs, f"{case['difference']:.0e}", _measure.verdict(case["same_program"]))
    imported = results["import"]
    speed.add_row(
        "import replicax / import jax",
        "",
        f"{imported['replicax_s']:.3f} s",
        f"{imported['jax_s']:.3f} s",
        f"{imported['longer_s']:+.3f} s",
        "",
        f"≤ {import_time.BAR} s",
        _measure.verdict(imported["passed"]),
    )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(speed)
    console.print(same)
    first_call.show([results["first_call"]])


def _right(*headers: str) -> Iterator[Column]:
    from rich.table import Column

    return (Column(header, justify="right", no_wrap=True) for header in headers)


def main() -> None:
    description = "What Replicax costs, against hand-written jit(shard_map)."
    results = _measure.measured(description, "a third", measure_here, measure, ROUNDS, quick_share=0.5)
    show(results)
    _measure.write("overhead.json", results)
    passed = all(c["passed"] and c["same_program"] for c in results["cases"])
    sys.exit(not (passed and results["import"]["passed"] and results["first_call"]["passed"]))


if __name__ == "__main__":
    main()
