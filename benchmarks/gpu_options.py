"""Which options of XLA's compiler for GPUs hide the gathers of fully sharded layers: by the compiled schedule.

    python benchmarks/gpu_options.py                       # about ten minutes on two cores
    python benchmarks/gpu_options.py "as Replicax sets them"

Llama 2 7B (``examples/language_model.py``), fully sharded on 8 × 8 H100s that are not there, 2 texts of 4,096 words for
each. Nothing is measured: times are predictions. Needs ``replicax[gpu-plan]``. Prints a table, and writes
``results/gpu_options.json``. See benchmarks/README.md.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent))

import _measure

import replicax
from examples import language_model
from replicax.backends.gpu import GATHERS_AHEAD

SET = dict(GATHERS_AHEAD)
PIPELINED = {name: value for name, value in SET.items() if "pipeline" in name}
COMBINED = {name: value for name, value in SET.items() if "combine" in name}
DOUBLE = {"xla_gpu_enable_while_loop_double_buffering": True}
CASES: dict[str, dict[str, Any]] = {
    "XLA's defaults": {},
    "combined": COMBINED,
    "pipelined": PIPELINED,
    "double buffering": DOUBLE,
    "4 collectives at once": {"xla_gpu_experimental_parallel_collective_overlap_limit": 4},
    "pipelined, double buffering": PIPELINED | DOUBLE,
    "combined, pipelined, double buffering": SET | DOUBLE,
    "as Replicax sets them": SET,
}
"""What Replicax sets is combined and pipelined."""


def planned(case: str) -> dict[str, Any]:
    GATHERS_AHEAD.clear()
    GATHERS_AHEAD.update(CASES[case])
    devices = replicax.GPUClusterResolver(topology="h100:8x8").devices
    strategy = replicax.ShardedStrategy(list(devices.flat))
    found = replicax.plan(strategy, *language_model.plan(strategy, "7b", 2, 4096))
    timeline = found.timeline
    assert timeline is not None
    return {
        "waiting_s": timeline.exposed,
        "communication_s": timeline.communication,
        "step_s": timeline.seconds,
        "collectives": sum(c.count for c in found.collectives),
        "temporaries": found.memory.temporaries,
    }


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    path = _measure.RESULTS / "gpu_options.json"
    for name in sys.argv[1:] or CASES:
        found = planned(name)
        earlier = json.loads(path.read_text())["cases"] if path.exists() else {}
        _measure.write(path.name, {"cases": {**earlier, name: found}})
    cases = json.loads(path.read_text())["cases"]
    table = Table("options", "waiting", "collectives", "a step", "temporaries")
    for name in CASES:
        if (case := cases.get(name)) is not None:
            table.add_row(
                name,
                f"{1e3 * case['waiting_s']:.0f} of {1e3 * case['communication_s']:.0f} ms",
                f"{case['collectives']:,}",
                f"{case['step_s']:.3f} s",
                f"{case['temporaries'] / 2**30:.2f} GiB",
            )
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    main()
