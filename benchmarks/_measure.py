"""Timing two ways of doing the same thing, so that the noise of a busy machine falls on both alike."""

from __future__ import annotations

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


def interleave(
    a: Callable[[], None], b: Callable[[], None], seconds: float, block: int = 1, warmup: int = 20
) -> Paired:
    """Time ``a`` and ``b`` in turn for about ``seconds``: A B, B A, A B, …

    Both must return only when their work is done. A time is the mean of ``block`` calls in a row.
    """
    for _ in range(warmup):
        a()
        b()
    times_a: list[float] = []
    times_b: list[float] = []
    sides = [(a, times_a), (b, times_b)]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times_a) % 2:
        for call, times in sides:
            start = time.perf_counter()
            for _ in range(block):
                call()
            times.append((time.perf_counter() - start) / block)
        sides.reverse()
    return Paired(times_a, times_b)


def in_subprocess(script: str, *arguments: str) -> Any:
    """Run a script of this folder in a process of its own, and return the JSON that it prints last.

    The number of emulated devices is fixed for the life of a process, so each number needs its own.
    """
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script} {' '.join(arguments)} failed with exit code {done.returncode}:\n{done.stdout}")
    return json.loads(done.stdout.splitlines()[-1])


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in ("jax", "jaxlib", "optax", "numpy")},
    }


def write(name: str, results: dict[str, Any]) -> Path:
    """Write ``results`` and the machine to ``results/name``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / name
    path.write_text(json.dumps({"machine": machine(), **results}, indent=2) + "\n")
    return path
