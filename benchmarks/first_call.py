"""What the first call of a step costs, against hand-written ``jit(shard_map)``, and where the first seconds go.

    python benchmarks/first_call.py [--quick] [--where]

The first table compares the first call of a transformer's step in fresh processes, in turn: its processor time, its
time, and the peak memory of the process; without and with a warm compilation cache. With ``--where`` the second table
shows what the first seconds of four programs are spent on; it leaves out those whose library is not installed. Writes
``results/first_call.json``, and exits with 1 if a bar is missed. See README.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _measure

TIME, MEMORY, TIME_CACHED = 1.15, 1.10, 1.25
"""The largest ratios that pass."""
CASES = tuple((layers, devices, cached) for layers in (16, 48) for devices in (1, 4, 8) for cached in (False, True))
QUICK = ((16, 4, False), (16, 4, True))


# --- one process ----------------------------------------------------------------------------------------


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def first_call(side: str, layers: int, devices: int) -> dict[str, float]:
    """The first call of one side, in this process."""
    import replicax

    replicax.use_cpu_devices(devices)
    import _steps

    train = _steps.train_replicax if side == "replicax" else _steps.train_by_hand
    call = train(_steps.transformer(layers)).call
    start, cpu = time.perf_counter(), _cpu()
    call()
    seconds, cpu = time.perf_counter() - start, _cpu() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "cpu": cpu, "peak_mb": peak}


Mark = Callable[[str], None]


def _digits(mark: Mark) -> Callable[[], Any]:
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    import digits

    import replicax

    mark("imports")
    replicax.use_cpu_devices(digits.REPLICAS)
    strategy = replicax.MirroredStrategy()
    train, _ = digits.load_data()
    with strategy.scope():
        _, step, _ = digits.build(seed=0, steps=300)
    mark("variables")
    batches = iter(strategy.distribute_dataset(digits.global_batches(strategy, train, seed=0, epochs=30)))
    batch = next(batches)
    mark("dataset")
    return lambda: strategy.run(step, args=(batch,))


def _transformer(mark: Mark) -> Callable[[], Any]:
    import replicax

    replicax.use_cpu_devices(4)
    import _steps

    mark("imports")
    problem = _steps.transformer(16)
    strategy = replicax.MirroredStrategy()
    step, _, _ = _steps.replicax_step(strategy, problem)
    mark("variables")
    [batch] = strategy.distribute_dataset([problem.batch])
    mark("dataset")
    return lambda: strategy.run(step, args=(batch,))


def _nnx(mark: Mark) -> Callable[[], Any]:
    import numpy as np
    import optax
    from flax import nnx

    import replicax

    class CNN(nnx.Module):
        """The model of NNX's tutorial on MNIST."""

        def __init__(self, rngs: nnx.Rngs) -> None:
            self.conv1 = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
            self.conv2 = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
            self.linear1 = nnx.Linear(3136, 256, rngs=rngs)
            self.linear2 = nnx.Linear(256, 10, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = nnx.avg_pool(nnx.relu(self.conv1(x)), window_shape=(2, 2), strides=(2, 2))
            x = nnx.avg_pool(nnx.relu(self.conv2(x)), window_shape=(2, 2), strides=(2, 2))
            return self.linear2(nnx.relu(self.linear1(x.reshape(len(x), -1))))

    mark("imports")
    replicax.use_cpu_devices(2)
    strategy = replicax.MirroredStrategy()
    with strategy.scope():
        model = CNN(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(0.005, 0.9), wrt=nnx.Param)
    mark("variables")
    images = np.random.default_rng(0).normal(size=(32, 28, 28, 1)).astype(np.float32)
    [(images, labels)] = strategy.distribute_dataset([(images, np.arange(32, dtype=np.int32) % 10)])
    mark("dataset")

    def step(model: Any, optimizer: Any, images: Any, labels: Any) -> Any:
        def loss_fn(model: Any) -> Any:
            losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
            return replicax.compute_average_loss(losses)

        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    return lambda: strategy.run(step, args=(model, optimizer, images, labels))


def _keras(mark: Mark) -> Callable[[], Any]:
    os.environ["KERAS_BACKEND"] = "jax"
    import keras
    import numpy as np

    import replicax

    mark("imports")
    replicax.use_cpu_devices(2)
    with replicax.MirroredStrategy().scope():
        layers = [keras.Input((16,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(4)]
        model = keras.Sequential(layers)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    mark("variables")
    x = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
    y = np.arange(64, dtype=np.int32) % 4
    mark("dataset")
    return lambda: model.fit(x, y, batch_size=32, verbose=0)


PROGRAMS: dict[str, tuple[str, str, Callable[[Mark], Callable[[], Any]]]] = {
    "digits": ("examples/digits.py, 8 replicas", "sklearn", _digits),
    "transformer": ("transformer of 16 layers, 4 replicas", "optax", _transformer),
    "nnx": ("NNX's tutorial, 2 replicas", "flax", _nnx),
    "keras": ("Keras' fit of 2 batches, 2 replicas", "keras", _keras),
}
STAGES = ("imports", "variables", "dataset", "tracing and running", "lowering", "compiling", "second call")


def where(name: str) -> dict[str, float]:
    """The seconds of each stage of a program, in this process. Compiling in the first call is apart."""
    start = time.perf_counter()
    import jax

    stages: dict[str, float] = {}
    compiling = {"jaxpr_to_mlir_module_duration": 0.0, "backend_compile_duration": 0.0}

    def listen(event: str, seconds: float, **_: Any) -> None:
        stage = event.rsplit("/", 1)[-1]
        if stage in compiling:
            compiling[stage] += seconds

    def mark(stage: str) -> None:
        nonlocal start
        stages[stage] = time.perf_counter() - start
        compiling.update(dict.fromkeys(compiling, 0.0))
        start = time.perf_counter()

    jax.monitoring.register_event_duration_secs_listener(listen)
    call = PROGRAMS[name][2](mark)
    jax.block_until_ready(jax.tree.leaves(call()))
    lowering, compiled = compiling.values()
    stages["lowering"], stages["compiling"] = lowering, compiled
    stages["tracing and running"] = time.perf_counter() - start - lowering - compiled
    start = time.perf_counter()
    jax.block_until_ready(jax.tree.leaves(call()))
    mark("second call")
    return stages


# --- all of them ----------------------------------------------------------------------------------------


def measure(layers: int, devices: int, cached: bool, pairs: int) -> dict[str, Any]:
    """One case in fresh processes, in turn; with ``cached`` the compilation cache has both programs already."""
    found: dict[str, list[dict[str, float]]] = {"replicax": [], "by hand": []}
    with tempfile.TemporaryDirectory() as cache:
        if cached:
            os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
            os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
            for side in found:
                _measure.in_subprocess("first_call.py", "--side", side, str(layers), str(devices))
        for i in range(pairs):
            for side in list(found) if i % 2 else list(found)[::-1]:
                done = _measure.in_subprocess("first_call.py", "--side", side, str(layers), str(devices))
                found[side].append(done)
        os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    sides = {
        side: {what: statistics.median(run[what] for run in runs) for what in runs[0]} for side, runs in found.items()
    }
    ratios = {what: sides["replicax"][what] / sides["by hand"][what] for what in sides["replicax"]}
    passed = ratios["cpu"] <= (TIME_CACHED if cached else TIME) and (cached or ratios["peak_mb"] <= MEMORY)
    case = {"layers": layers, "devices": devices, "cached": cached, "pairs": pairs}
    return {**case, **sides, "ratios": ratios, "passed": passed}


def show(cases: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="The first call of a transformer's step, Replicax / by hand", show_lines=False)
    for header in ("layers", "devices", "cache", "processor s", "ratio", "s", "ratio", "peak MB", "ratio", ""):
        table.add_column(header, justify="right", no_wrap=True)
    for case in cases:
        cells = []
        for what, style in (("cpu", ".2f"), ("seconds", ".2f"), ("peak_mb", ",.0f")):
            cells.append(" / ".join(format(case[side][what], style) for side in ("replicax", "by hand")))
            cells.append(f"{case['ratios'][what]:.2f}")
        start = [str(case["layers"]), str(case["devices"]), "warm" if case["cached"] else "none"]
        table.add_row(*start, *cells, _measure.verdict(case["passed"]))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def show_where(programs: dict[str, dict[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", title="Where the first seconds go")
    for header in (*STAGES, "in all"):
        table.add_column(header, justify="right")
    for name, stages in programs.items():
        cells = (f"{seconds:.2f}" for seconds in (*(stages[s] for s in STAGES), sum(stages.values())))
        table.add_row(PROGRAMS[name][0], *cells)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def programs_here() -> Iterator[str]:
    """Those whose library is installed."""
    return (name for name, (_, library, _) in PROGRAMS.items() if importlib.util.find_spec(library))


def main() -> None:
    parser = argparse.ArgumentParser(description="What the first call of a step costs, against hand-written JAX.")
    parser.add_argument("--quick", action="store_true", help="16 layers on 4 devices only")
    parser.add_argument("--where", nargs="?", const="", help="show where the first seconds go, instead")
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)  # one process of the measurement
    options = parser.parse_args()
    if options.side:
        side, layers, devices = options.side
        print(json.dumps(first_call(side, int(layers), int(devices))))
    elif options.where:
        print(json.dumps(where(options.where)))
    elif options.where is not None:
        show_where({name: _measure.in_subprocess("first_call.py", "--where", name) for name in programs_here()})
    else:
        cases = [measure(*case, pairs=2 if options.quick else 3) for case in (QUICK if options.quick else CASES)]
        show(cases)
        _measure.write("first_call.json", {"cases": cases})
        sys.exit(not all(case["passed"] for case in cases))


if __name__ == "__main__":
    main()
