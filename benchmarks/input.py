"""What input costs: waiting for it while training, and elements a second.

    python benchmarks/input.py [--quick]

Prints a table, writes ``results/input.json``, and exits with 1 if a bar is missed. Where TensorFlow is installed its
``experimental_distribute_dataset`` is measured in the same run. See README.md.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import _measure
from _measure import Paired

REPLICAS = (2, 8)
LATENCY = 0.8
"""Of a step: how long the storage takes for each batch."""
WAITING_BAR = 0.03
RATE_BAR = 0.95
CASES = {
    "64 rows of 32 floats (8 KiB)": ((64, 32), False),
    "the same, by a function": ((64, 32), True),
    "128 images of 28×28×3 (1.1 MiB)": ((128, 28, 28, 3), False),
}
"""Shape of an element, and whether a function of the user's makes each example."""
ELEMENTS = 200
"""In a pass."""


# --- one process ----------------------------------------------------------------------------------------


def waiting(replicas: int, rounds: int, steps: int) -> dict[str, Any]:
    """The share of a step's time spent in ``next(iterator)``, with storage that takes 80% of a step.

    The median of some rounds, each a pass of its own: where another process takes a core for a moment, a step of 8
    replicas on few cores takes twice as long, and the storage, which keeps pace with it, is late for the next steps.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    import replicax

    replicax.use_cpu_devices(replicas)
    strategy = replicax.MirroredStrategy()
    batch = np.ones((8 * replicas, 256), np.float32)

    def step(x: Any) -> Any:
        def layer(_: Any, x: Any) -> Any:
            return jnp.tanh(x @ jnp.eye(256))

        return jnp.sum(jax.lax.fori_loop(0, 1280 // replicas, layer, x))

    # A step's own time, lately: storage keeps pace with a machine whose speed changes from minute to minute.
    lately: collections.deque[float] = collections.deque(maxlen=20)

    def timed(elements: Any, count: int) -> tuple[float, float]:
        """Means of the time of a step, and of the wait before it."""
        computing, waits = [], []
        for _ in range(count):
            start = time.perf_counter()
            element = next(elements)
            waits.append(time.perf_counter() - start)
            start = time.perf_counter()
            strategy.run(step, args=(element,)).values[0].block_until_ready()
            computing.append(time.perf_counter() - start)
            lately.append(computing[-1])
        return statistics.mean(computing), statistics.mean(waits)

    # Where all cores are busy, a thread that sleeps wakes late: by a sixth of a step with 8 replicas on two cores. That
    # is part of what storage takes, and so is taken off what is asked for.
    late: collections.deque[float] = collections.deque(maxlen=20)
    took: list[float] = []

    def endless(share: float) -> Callable[[], Any]:
        def batches() -> Any:
            late.clear()
            while True:
                latency = share * statistics.median(list(lately) or [0.0])
                asked = max(0.0, latency - statistics.mean(late or [0.0]))
                start = time.perf_counter()
                time.sleep(asked)  # waiting, as for storage; not computing
                took.append(time.perf_counter() - start)
                late.append(took[-1] - asked)
                yield batch

        return batches

    storage: list[float] = []

    def rounds_of(count: int, options: replicax.InputOptions | None = None) -> list[tuple[float, float]]:
        means = []
        for _ in range(rounds):
            with iter(strategy.distribute_dataset(endless(LATENCY), options)) as elements:
                timed(elements, 10)
                took.clear()
                means.append(timed(elements, count))
                storage.append(statistics.mean(took))
        return means

    with iter(strategy.distribute_dataset(endless(0.0))) as elements:
        timed(elements, 20)
    hidden = rounds_of(steps)
    latency = statistics.median(storage)
    unhidden = rounds_of(steps // 2, replicax.InputOptions(prefetch=0))
    computing = statistics.median(computing for computing, _ in hidden)
    shares = [[wait / (wait + computing) for computing, wait in means] for means in (hidden, unhidden)]
    return {
        "replicas": replicas,
        "step_ms": computing * 1e3,
        "latency_ms": latency * 1e3,
        "waiting": statistics.median(shares[0]),
        "waiting_of_each_round": shares[0],
        "waiting_without_prefetch": statistics.median(shares[1]),
    }


def rate(replicas: int, case: str, seconds: float) -> dict[str, Any]:
    """The time of a pass, against a bare Grain iterator whose batches ``jax.device_put`` lays on the devices."""
    import grain
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import replicax

    replicax.use_cpu_devices(replicas)
    strategy = replicax.MirroredStrategy()
    shape, is_mapped = CASES[case]
    batch, *row = shape
    examples = np.random.default_rng(0).normal(size=(batch * ELEMENTS, *row)).astype(np.float32)
    source = grain.MapDataset.source(examples)
    dataset = (source.map(lambda row: row * 2) if is_mapped else source).batch(batch)
    sharding = NamedSharding(strategy.extended.mesh, PartitionSpec("replica"))
    distributed = strategy.distribute_dataset(dataset)

    def ours() -> None:
        count = 0
        for element in distributed:  # noqa: B007
            count += 1
        jax.block_until_ready(element.values)
        assert count == ELEMENTS

    def bare() -> None:
        count = 0
        for host in dataset.to_iter_dataset():
            element = jax.device_put(host, sharding)
            count += 1
        element.block_until_ready()
        assert count == ELEMENTS

    calls = [bare, ours]
    tensorflow = _with_tensorflow(replicas, examples, batch, is_mapped)
    if tensorflow is not None:
        calls.append(tensorflow)
    times = _measure.interleave(calls, seconds, warmup=2)
    result = {"replicas": replicas, "case": case, **Paired(times[0], times[1]).summary()}
    result["elements_per_s"] = [ELEMENTS / statistics.median(side) for side in times]
    if tensorflow is not None:
        result["tensorflow"] = Paired(times[2], times[1]).summary()
    return result


def _with_tensorflow(replicas: int, examples: Any, batch: int, is_mapped: bool) -> Callable[[], None] | None:
    """The same pass by ``tf.data``, under TensorFlow's own MirroredStrategy; ``None`` where it is not installed."""
    if importlib.util.find_spec("tensorflow") is None:
        return None
    import tensorflow as tf

    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    dataset = tf.data.Dataset.from_tensor_slices(examples)
    dataset = (dataset.map(lambda row: row * 2) if is_mapped else dataset).batch(batch).prefetch(2)
    distributed = strategy.experimental_distribute_dataset(dataset)

    def go() -> None:
        count = 0
        for element in distributed:  # noqa: B007
            count += 1
        strategy.experimental_local_results(element)[-1].numpy()
        assert count == ELEMENTS

    return go


# --- all of them ----------------------------------------------------------------------------------------


def show(results: dict[str, Any]) -> bool:
    """Print the tables; whether all bars are met."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120)
    table = Table(title=f"Waiting for input, from storage that takes {LATENCY:.0%} of a step for each batch")
    for column in ("replicas", "step", "storage", "waiting", "least to most", "bar", "without reading ahead"):
        table.add_column(column, justify="right")
    passed = True
    for r in results["waiting"]:
        passed &= r["waiting"] < WAITING_BAR
        table.add_row(
            str(r["replicas"]),
            f"{r['step_ms']:.1f} ms",
            f"{r['latency_ms']:.1f} ms",
            f"{r['waiting']:.2%}",
            f"{min(r['waiting_of_each_round']):.2%} to {max(r['waiting_of_each_round']):.2%}",
            f"< {WAITING_BAR:.0%} {'pass' if r['waiting'] < WAITING_BAR else 'FAIL'}",
            f"{r['waiting_without_prefetch']:.1%}",
        )
    console.print(table)
    table = Table(title="Elements a second: distribute_dataset over a bare Grain iterator with jax.device_put")
    for column in ("element", "replicas", "Replicax", "bare Grain", "ratio", "95%", "bar", "over tf.data"):
        table.add_column(column, justify="right")
    for r in results["rate"]:
        passed &= r["ratio"] >= RATE_BAR
        low, high = r["ratio_95"]
        table.add_row(
            r["case"],
            str(r["replicas"]),
            f"{r['elements_per_s'][1]:,.0f}/s",
            f"{r['elements_per_s'][0]:,.0f}/s",
            f"{r['ratio']:.2f}",
            f"{low:.2f}–{high:.2f}",
            f"≥ {RATE_BAR} {'pass' if r['ratio'] >= RATE_BAR else 'FAIL'}",
            f"{r['tensorflow']['ratio']:.2f}" if "tensorflow" in r else "not installed",
        )
    console.print(table)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a third of the time, and noisier")
    parser.add_argument("--here", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        what, parameters = args.here[0], json.loads(args.here[1])
        print(json.dumps(waiting(**parameters) if what == "waiting" else rate(**parameters)))
        return
    rounds, steps, seconds = (5, 30, 5.0) if args.quick else (7, 60, 15.0)
    run = lambda what, **kwargs: _measure.in_subprocess("input.py", "--here", what, json.dumps(kwargs))  # noqa: E731
    results = {
        "waiting": [run("waiting", replicas=n, rounds=rounds, steps=steps) for n in REPLICAS],
        "rate": [run("rate", replicas=n, case=case, seconds=seconds) for case in CASES for n in REPLICAS],
    }
    passed = show(results)
    _measure.write("input.json", results)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
