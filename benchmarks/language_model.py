"""Plans of Llama 2 with 7 and 70 billion parameters: which placements fit; and estimates beside what others measured.

    python benchmarks/language_model.py              # all of it; half an hour on two cores
    python benchmarks/language_model.py 70b-v5e-256  # one of its rows, and the table with the others from the last run

The model is ``examples/language_model.py``, compiled for slices that are not there. Nothing is measured here: the times
measured on TPUs are published ones, by other programs, each with its source. An estimate is the least that a step can
take, so it has to be below what somebody has measured; if one is above, the exit status is 1. Prints two tables, and
writes ``results/language_model.json``. Needs libtpu. See benchmarks/README.md.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent))

import _measure

import replicax
from examples import language_model


@dataclasses.dataclass(frozen=True)
class Published:
    """A measurement by others: words (tokens) per second of a chip, or the share of its peak that the model used.

    The share (MFU) counts 6 FLOPs for each parameter and word, and 12 for each layer, its width, the length and word.
    """

    who: str
    source: str
    words: float = 0.0
    mfu: float = 0.0

    def words_per_second(self, size: language_model.Size, length: int, peak: float) -> float:
        parameters = sum(map(math.prod, language_model.shapes(size).values()))
        return self.words or self.mfu * peak / (6 * parameters + 12 * size.layers * size.width * length)


@dataclasses.dataclass(frozen=True)
class Row:
    """A model on a slice: so many texts of so many words for each replica."""

    size: str
    topology: str
    placement: str = "sharded"
    batch: int = 4
    length: int = 4096
    published: Published | None = None

    def plan(self) -> replicax.planning.Plan:
        resolver = replicax.TPUClusterResolver(topology=self.topology)
        strategy: replicax.Strategy
        if self.placement == "sharded":
            strategy = replicax.ShardedStrategy(list(resolver.devices.flat))
        else:
            cores = [int(n) for n in self.placement.removeprefix("mirrored ").split("x")]
            assignment = replicax.DeviceAssignment.build(resolver.topology, cores, num_replicas=None)
            strategy = replicax.TPUStrategy(resolver, assignment)
        return replicax.plan(strategy, *language_model.plan(strategy, self.size, self.batch, self.length))


TIERING = "https://maxtext.readthedocs.io/en/latest/reference/models/tiering.html"
LLAMA2 = "https://github.com/AI-Hypercomputer/maxtext/blob/main/getting_started/Run_Llama2.md"
TRILLIUM = "https://github.com/AI-Hypercomputer/tpu-recipes/tree/main/training/trillium/Llama2-70B-MaxText"
AXLEARN = "https://arxiv.org/abs/2507.05411"  # a step of 4 million words, as Llama 2 was trained
OPEN_LLAMA = "https://github.com/openlm-research/open_llama"

ROWS = {
    "70b-v5p-64": Row("70b", "v5p:4x4x4", published=Published("MaxText", LLAMA2, mfu=0.65)),
    "70b-v5p-64-mirrored": Row("70b", "v5p:4x4x4", "mirrored 1x1x1x1"),
    "70b-v5p-64-mirrored-8": Row("70b", "v5p:4x4x4", "mirrored 2x2x2x1"),
    "70b-v5p-16": Row("70b", "v5p:2x2x4"),
    "70b-v5e-256": Row("70b", "v5e:16x16", batch=2, length=2048, published=Published("MaxText", LLAMA2, mfu=0.57)),
    "70b-v6e-256": Row("70b", "v6e:16x16", batch=2, published=Published("MaxText", TRILLIUM, words=905.021)),
    "7b-v5p-256": Row("7b", "v5p:4x8x8", published=Published("AXLearn", AXLEARN, words=4096 * 4 / 2.5)),
    "70b-v5p-512": Row("70b", "v5p:8x8x8", published=Published("MaxText", TIERING, words=692)),
    "70b-v5p-512-batch-2": Row("70b", "v5p:8x8x8", batch=2, published=Published("AXLearn", AXLEARN, words=8192 / 11.6)),
    "7b-v4-64": Row("7b", "v4:4x4x4", batch=4, length=2048, published=Published("OpenLLaMA", OPEN_LLAMA, words=2200)),
}


def planned(row: Row) -> dict[str, Any]:
    found = row.plan()
    assert found.estimate is not None
    assert found.chip is not None
    result = {
        "fits": found.fits,
        "memory": found.memory.total,
        "arguments": found.memory.arguments,
        "temporaries": found.memory.temporaries,
        "capacity": found.memory.capacity,
        "bound_by": found.estimate.bound_by,
        "compute_s": found.estimate.compute,
        "memory_s": found.estimate.memory,
        "communication_s": found.estimate.communication,
        "at_least_s": found.estimate.at_least,
        "trace_s": found.trace_seconds,
        "compile_s": found.compile_seconds,
        "peak_resident": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    if row.published is not None:
        words = row.published.words_per_second(language_model.SIZES[row.size], row.length, found.chip.flops)
        result["measured_s"] = row.batch * row.length / words
        result["ratio"] = result["measured_s"] / result["at_least_s"]
    return result


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    path = _measure.RESULTS / "language_model.json"
    if not sys.argv[1:]:
        path.unlink(missing_ok=True)
    for name in sys.argv[1:] or ROWS:
        found = planned(ROWS[name])
        earlier = json.loads(path.read_text())["rows"] if path.exists() else {}
        _measure.write(path.name, {"rows": {**earlier, name: found}})
    results = json.loads(path.read_text())["rows"]
    fits = Table("model", "slice", "placement", "texts", "length", "needs", "of", "fits", title="Memory of a device")
    times = Table("model", "slice", "texts", "length", "at least", "bound by", "measured", "ratio", "by", "source")
    times.title = "A step: the estimate, and what others measured"
    for name, row in ROWS.items():
        if (found := results.get(name)) is None:
            continue
        what = (row.size, row.topology)
        needs, there = (f"{found[key] / 2**30:.1f} GiB" for key in ("memory", "capacity"))
        answer = "yes" if found["fits"] else "no"
        fits.add_row(*what, row.placement, str(row.batch), str(row.length), needs, there, answer)
        if row.published is not None:
            seconds = (f"{found['at_least_s']:.2f} s", found["bound_by"], f"{found['measured_s']:.2f} s")
            by = (f"{found['ratio']:.2f}", row.published.who, row.published.source)
            times.add_row(*what, str(row.batch), str(row.length), *seconds, *by)
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(fits)
    console.print(times)
    if above := [name for name, found in results.items() if found.get("ratio", math.inf) < 1]:
        sys.exit(f"the estimate is above what somebody has measured: {', '.join(above)}")


if __name__ == "__main__":
    main()
