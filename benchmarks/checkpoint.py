"""What saving costs a run: how long a save keeps it from going on, and how much memory a restore takes.

    python benchmarks/checkpoint.py [--quick]

A save returns when everything has been copied from the devices to the host, so the bar is a plain copy of the same
bytes: ``np.array`` of each. Beside it there are the first save of a run, which makes what the others have; a copy into
memory that is there already; and bare Orbax, ``AsyncCheckpointer.save`` of the same arrays. Prints tables, writes
``results/checkpoint.json``, and exits with 1 if a bar is missed. See README.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import _measure
from _measure import Paired

BAR = 1.1
MEMORY_BAR = 1.0
"""How many GiB a restore may need beyond the state."""
CASES = {
    "8 arrays of 16 MiB": (8, (1024, 4096)),
    "200 arrays of 256 KiB": (200, (256, 256)),
    "1,000 arrays of 16 KiB": (1000, (64, 64)),
}
STRATEGIES = {
    "one device": ("OneDeviceStrategy", 1),
    "mirrored on 2": ("MirroredStrategy", 2),
    "split over 2": ("ShardedStrategy", 2),
}


def variables_of(strategy: Any, count: int, shape: tuple[int, int], value: float = 1.0) -> list[Any]:
    import numpy as np

    import replicax

    with strategy.scope():
        return [replicax.Variable(np.full(shape, value, np.float32)) for _ in range(count)]


def strategy_named(name: str) -> Any:
    import replicax

    kind, devices = STRATEGIES[name]
    replicax.use_cpu_devices(devices)
    named = [f"cpu:{i}" for i in range(devices)]
    return replicax.OneDeviceStrategy("cpu:0") if devices == 1 else getattr(replicax, kind)(named)


def blocking(name: str, case: str, rounds: int) -> dict[str, Any]:
    """Times of a save until it returns, of a copy, of one into old memory, and of Orbax until it returns; interleaved.

    Each is called once before that; what the first save took is returned, too.
    """
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    import replicax

    logging.getLogger("absl").setLevel(logging.ERROR)
    strategy = strategy_named(name)
    variables = variables_of(strategy, *CASES[case])
    folder = tempfile.mkdtemp()
    checkpoint = replicax.Checkpoint(model=variables)
    bare = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
    numbers = iter(range(10**6))
    memory: list[Any] = []

    def arrays() -> list[Any]:
        return [variable.slot.array for variable in variables]

    def step() -> None:
        for variable in variables:
            variable.assign(variable.value + 1.0)

    def after_a_step(call: Callable[[], tuple[float, float]]) -> tuple[float, float]:
        """Of arrays that have not been copied before, as JAX keeps what it has copied."""
        strategy.run(step)
        jax.block_until_ready(arrays())
        return call()

    def ours() -> tuple[float, float]:
        path = os.path.join(folder, f"ours-{next(numbers)}")
        start = time.perf_counter()
        checkpoint.save(path, wait=False)
        blocked = time.perf_counter() - start
        checkpoint.wait()
        written = time.perf_counter() - start
        shutil.rmtree(path)
        return blocked, written

    def copy() -> tuple[float, float]:
        start = time.perf_counter()
        copies = [
            np.array(a) if a.is_fully_replicated else [np.array(shard.data) for shard in a.addressable_shards]
            for a in arrays()
        ]
        took = time.perf_counter() - start
        assert len(copies) == len(variables)
        return took, took

    def copy_into_old_memory() -> tuple[float, float]:
        if not memory:
            shards = [a.addressable_shards[: 1 if a.is_fully_replicated else None] for a in arrays()]
            memory.extend(np.array(shard.data) for each in shards for shard in each)
        start = time.perf_counter()
        places = iter(memory)
        for a in arrays():
            for one in [a] if a.is_fully_replicated else [shard.data for shard in a.addressable_shards]:
                next(places)[...] = one
        took = time.perf_counter() - start
        assert next(places, None) is None
        return took, took

    def orbax() -> tuple[float, float]:
        path = os.path.join(folder, f"orbax-{next(numbers)}")
        start = time.perf_counter()
        bare.save(path, args=ocp.args.StandardSave(dict(enumerate(arrays()))))
        blocked = time.perf_counter() - start
        bare.wait_until_finished()
        written = time.perf_counter() - start
        shutil.rmtree(path)
        return blocked, written

    calls = [ours, copy, copy_into_old_memory, orbax]
    first, *_ = [after_a_step(call)[0] for call in calls]
    times: list[list[tuple[float, float]]] = [[] for _ in calls]
    for number in range(rounds):
        for place in range(len(calls)):
            which = (number + place) % len(calls)
            times[which].append(after_a_step(calls[which]))
    shutil.rmtree(folder)
    sides = zip(("ours", "copy", "old memory", "orbax"), times, strict=True)
    return {"first": first, **{side: list(zip(*found, strict=True)) for side, found in sides}}


def memory(name: str, gibibytes: float) -> dict[str, float]:
    """The state, and how much the process grows beyond what it has when the variables are there."""
    import replicax

    strategy = strategy_named(name)
    count = int(gibibytes * 2**30 / (64 << 20))
    variables = variables_of(strategy, count, (4096, 4096))
    path = os.path.join(tempfile.mkdtemp(), "state")
    replicax.Checkpoint(model=variables).save(path)
    for variable in variables:
        variable.assign(variable.numpy() * 0)
    checkpoint = replicax.Checkpoint(model=variables)
    before, most, is_over = resident(), [0.0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.01):
            most[0] = max(most[0], resident())

    thread = threading.Thread(target=watch)
    thread.start()
    start = time.perf_counter()
    checkpoint.restore(path)
    seconds = time.perf_counter() - start
    is_over.set()
    thread.join()
    assert float(variables[-1].value[0, 0]) == 1.0
    shutil.rmtree(os.path.dirname(path))
    copies = 1 if name == "split over 2" else STRATEGIES[name][1]
    return {"state": count * 64 / 1024 * copies, "more": most[0] - before, "seconds": seconds}


def resident() -> float:
    """The memory of this process, in GiB."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30


# --- all processes --------------------------------------------------------------------------------------


def main() -> int:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="about a tenth of the time, and much noisier")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)  # one process of the measurement
    parser.add_argument("--rounds", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--gibibytes", type=float, default=2.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        what, name = options.part
        print(json.dumps(memory(name, options.gibibytes) if what == "memory" else blocking(name, what, options.rounds)))
        return 0
    rounds = 4 if options.quick else 30
    times = Table(title="How long a save keeps the run from going on (medians, and the median of paired ratios)")
    measured = ("first save", "a save", "a copy", "ratio", "95%", "bar", "", "into old memory", "written after")
    for column in ("state", "arrays", *measured, "Orbax", "Orbax / copy", "written after"):
        times.add_column(column, justify="left" if column in ("state", "arrays") else "right")
    results: dict[str, Any] = {"blocking": [], "memory": []}
    is_good = True
    for name in STRATEGIES:
        for case in CASES:
            found = _measure.in_subprocess("checkpoint.py", "--part", case, name, "--rounds", str(rounds))
            pair, beside = (Paired(found[side][0], found["copy"][0]) for side in ("ours", "orbax"))
            old = Paired(found["ours"][0], found["old memory"][0])
            passes = pair.ratio <= BAR
            is_good &= passes
            written = [statistics.median(found[side][1]) for side in ("ours", "orbax")]
            results["blocking"].append(
                {
                    "state": name,
                    "arrays": case,
                    "first_ms": found["first"] * 1e3,
                    "save": pair.summary(),
                    "into_old_memory": old.summary(),
                    "orbax": beside.summary(),
                    "written": written,
                }
            )
            ours, theirs = pair.summary(), beside.summary()
            times.add_row(
                name,
                case,
                f"{found['first'] * 1e3:.1f} ms",
                f"{ours['a_ms']:.1f} ms",
                f"{ours['b_ms']:.1f} ms",
                f"{pair.ratio:.2f}",
                "{:.2f}–{:.2f}".format(*pair.interval),
                f"≤ {BAR}",
                "pass" if passes else "FAIL",
                f"{old.ratio:.2f}",
                f"{written[0] * 1e3:.0f} ms",
                f"{theirs['a_ms']:.1f} ms",
                f"{beside.ratio:.2f}",
                f"{written[1] * 1e3:.0f} ms",
            )
    growth = Table(title="Memory that a restore takes besides the state")
    for column in ("state", "GiB", "more", "bar", "", "seconds"):
        growth.add_column(column, justify="left" if column == "state" else "right")
    for name in STRATEGIES:
        found = _measure.in_subprocess(
            "checkpoint.py", "--part", "memory", name, "--gibibytes", "0.5" if options.quick else "2"
        )
        passes = found["more"] <= MEMORY_BAR
        is_good &= passes
        results["memory"].append({"strategy": name, **found})
        growth.add_row(
            name,
            f"{found['state']:.1f}",
            f"{found['more']:.2f} GiB",
            f"≤ {MEMORY_BAR} GiB",
            "pass" if passes else "FAIL",
            f"{found['seconds']:.1f}",
        )
    console = Console(width=180)
    console.print(times, growth)
    _measure.write("checkpoint.json", results)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
