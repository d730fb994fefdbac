"""How much longer the imports of a program with Replicax take than ``import jax``: each in a fresh process, in turn.

python benchmarks/import_time.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

BAR = 0.25
"""Seconds."""
IMPORTS = {
    "jax": "import jax",
    # `import replicax` alone loads what is used later, when it is used.
    "replicax": "from replicax import MirroredStrategy, Optimizer, Variable, value_and_grad",
}


def measure(pairs: int) -> dict[str, Any]:
    """Times in seconds, from the first line of Python to the end of the import."""
    times: dict[str, list[float]] = {"jax": [], "replicax": []}
    # Modules are compiled once, as where they are installed, whatever PYTHONDONTWRITEBYTECODE says here.
    with tempfile.TemporaryDirectory() as compiled:
        for module in ("jax", "replicax"):
            _seconds(module, compiled)
        for i in range(pairs):
            for module in ("jax", "replicax") if i % 2 else ("replicax", "jax"):
                times[module].append(_seconds(module, compiled))
    longer = [ours - theirs for ours, theirs in zip(times["replicax"], times["jax"], strict=True)]
    return {
        "pairs": pairs,
        "jax_s": statistics.median(times["jax"]),
        "replicax_s": statistics.median(times["replicax"]),
        "longer_s": statistics.median(longer),
        "longer_s_range": [min(longer), max(longer)],
    }


def _seconds(module: str, compiled: str) -> float:
    imports = IMPORTS[module]
    program = f"import time; start = time.perf_counter(); {imports}; print(time.perf_counter() - start)"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = compiled
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description="How much longer import replicax takes than import jax.")
    parser.add_argument("--pairs", type=int, default=15, help="how many times to import each")
    result = measure(parser.parse_args().pairs)
    print(
        f"import jax {result['jax_s']:.3f} s, import replicax {result['replicax_s']:.3f} s: "
        f"{result['longer_s']:.3f} s longer (bar: {BAR} s)"
    )
    sys.exit(result["longer_s"] > BAR)


if __name__ == "__main__":
    main()
