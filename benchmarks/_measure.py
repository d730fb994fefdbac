"""Timing two ways of doing the same thing, so that the noise of a busy machine falls on both alike."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
      name: for the JSON and the command line.
      title: for the table.
      bar: the largest ratio A / B that passes; ``None`` for a figure that is only shown.
      seconds: how long to measure in each process.
    """

    name: str
    title: str
    bar: float | None
    seconds: float


@dataclasses.dataclass(frozen=True)
class Paired:
    """Times of A and B in seconds, measured in turn: entry ``i`` of both belongs to the same moment."""

    a: Sequence[float]
    b: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.a, self.b, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of A / B over the pairs."""
        return statistics.median(self.ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true median of the ratios lies, with 95% confidence (by order statistics)."""
        ordered, n = sorted(self.ratios), len(self.ratios)
        margin = round(0.98 * n**0.5)
        return ordered[max(0, n // 2 - margin)], ordered[min(n - 1, n // 2 + margin)]

    def summary(self) -> dict[str, Any]:
        return {
            "pairs": len(self.a),
            "ratio": self.ratio,
            "ratio_95": self.interval,
            "a_ms": statistics.median(self.a) * 1e3,
            "b_ms": statistics.median(self.b) * 1e3,
        }


def interleave(calls: Sequence[Callable[[], None]], seconds: float, warmup: int = 20) -> list[list[float]]:
    """Time the calls in turn for about ``seconds``, in alternating order: A B, B A, A B, …

    Each must return only when its work is done. Returns the times of each; entry ``i`` of all of them belongs
    to the same moment.
    """
    for _ in range(warmup):
        for call in calls:
            call()
    times: list[list[float]] = [[] for _ in calls]
    sides = list(zip(calls, times, strict=True))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) % 2:
        for call, mine in sides:
            start = time.perf_counter()
            call()
            mine.append(time.perf_counter() - start)
        sides.reverse()
    return times


def measured(
    description: str,
    quick: str,
    measure_here: Callable[[int, int, float], Any],
    measure: Callable[[int, float], dict[str, Any]],
    rounds: int,
    quick_share: float,
) -> dict[str, Any]:
    """What a benchmark's command line asks for: ``measure(rounds, share)``, or in a process of it ``measure_here``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help=f"about {quick} of the time, and noisier")
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)  # one process of the measurement
    parser.add_argument("--turn", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, default=1.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.devices is not None:
        print(json.dumps(measure_here(options.devices, options.turn, options.share)))
        sys.exit()
    return measure(2, quick_share) if options.quick else measure(rounds, 1.0)


def of_all_processes(found: Sequence[Sequence[Sequence[float]]], steps: int = 1) -> Paired:
    """The times of a step from ``[process][A or B][call]``, where each call makes ``steps`` steps."""
    return Paired(*([t / steps for times in found for t in times[side]] for side in (0, 1)))


def cells(summary: dict[str, Any], bar: float | None, passed: bool = True) -> tuple[str, str, str, str, str, str]:
    """What a row of a table says of a comparison: A, B, their ratio, where it lies, its bar, and the verdict.

    Args:
      summary: as :meth:`Paired.summary` returns it.
      bar: the largest ratio that passes; ``None``: the last two are empty.
      passed: whether everything else passes that belongs to the case.
    """
    ratio, (low, high) = summary["ratio"], summary["ratio_95"]
    times = (f"{summary[side]:#.4g} ms" for side in ("a_ms", "b_ms"))
    judged = ("", "") if bar is None else (f"≤ {bar:.2f}", verdict(passed and meets(summary, bar)))
    return (*times, f"{ratio:.3f}", f"{low:.3f}–{high:.3f}", *judged)


def verdict(passed: bool) -> str:
    return "[green]pass[/]" if passed else "[bold red]FAIL[/]"


def meets(summary: dict[str, Any], bar: float | None) -> bool:
    """Whether a comparison meets its bar, if it has one."""
    return bar is None or bool(summary["ratio"] <= bar)


def in_subprocess(script: str, *arguments: str) -> Any:
    """Run a script of this folder in a process of its own, and return the JSON that it prints last.

    The number of emulated devices is fixed for the life of a process, so each number needs its own.
    """
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[1:])} failed with exit code {done.returncode}:\n{done.stdout}")
    return json.loads(done.stdout.splitlines()[-1])


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in ("jax", "jaxlib", "optax", "numpy")},
    }


def write(name: str, results: dict[str, Any]) -> None:
    """Write ``results`` and the machine to ``results/name``, and say so."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / name
    path.write_text(json.dumps({"machine": machine(), **results}, indent=2) + "\n")
    print(f"written to benchmarks/results/{name}")
