"""A step on a batch that does not divide, against the same step on an even batch of the largest slice.

    python benchmarks/ragged.py            # exits with 1 if the bar is missed
    python benchmarks/ragged.py --quick    # a third of the time, and noisier

Both are called in turn on two emulated devices, also with four replicas on each, and on four devices; the first and
the second call are timed before. Writes
``results/ragged.json``. See README.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import _measure
import _steps
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import replicax

BAR = 3.0
# Of each replica; where these are more than the devices, several share one.
SIZES = {2: [(8, 6), (25, 24), (2, 2, 2, 2, 2, 0, 0, 0)], 4: [(13, 13, 12, 12), (13, 13, 13, 11), (1, 0, 0, 0)]}


def convolutions() -> _steps.Problem:
    """The digits' network: two convolutions, two dense layers, 8×8 images; Adam."""
    rng = np.random.default_rng(0)
    shapes = [(3, 3, 1, 32), (3, 3, 32, 64), (4 * 4 * 64, 128), (128, 10)]
    initial = [(rng.normal(size=s) * np.prod(s[:-1]) ** -0.5).astype(np.float32) for s in shapes]

    def losses(params: Any, images: Any, labels: Any) -> Any:
        first, second, dense, last = params
        x = images.reshape(-1, 8, 8, 1)
        for kernel in (first, second):
            x = jax.nn.relu(
                jax.lax.conv_general_dilated(x, kernel[...], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            )
        x = x.reshape(x.shape[0], 4, 2, 4, 2, 64).max((2, 4)).reshape(x.shape[0], 4 * 4 * 64)
        x = jax.nn.relu(x @ dense) @ last
        return optax.softmax_cross_entropy_with_integer_labels(x, labels)

    return _steps.Problem(initial, _steps._images(rng, 64, 10), losses, optax.adam(1e-3))


def small_mlp() -> _steps.Problem:
    """64-128-10, softmax cross entropy, Adam."""
    rng = np.random.default_rng(0)
    initial = [
        (rng.normal(size=(64, 128)) / 8).astype(np.float32),
        np.zeros(128, np.float32),
        (rng.normal(size=(128, 10)) / 11).astype(np.float32),
    ]

    def losses(params: Any, images: Any, labels: Any) -> Any:
        w, b, last = params
        return optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(images @ w + b) @ last, labels)

    return _steps.Problem(initial, _steps._images(rng, 64, 10), losses, optax.adam(1e-3))


PROBLEMS: dict[str, Callable[[], _steps.Problem]] = {"digits' CNN": convolutions, "MLP, Adam": small_mlp}


def training(problem: _steps.Problem, sizes: tuple[int, ...]) -> Callable[[], None]:
    """A call of a training step on slices of these sizes."""
    strategy = replicax.MirroredStrategy(num_replicas=len(sizes))
    with strategy.scope():
        variables = [replicax.Variable(value) for value in problem.initial]
        optimizer = replicax.Optimizer(problem.tx)
        optimizer.build(variables)
    starts = np.cumsum([0, *sizes])

    def part(ctx: Any) -> tuple[Any, ...]:
        i = ctx.replica_id_in_sync_group
        return tuple(a[starts[i] : starts[i + 1]] for a in problem.batch)

    batch = strategy.distribute_values_from_function(part)

    def step(batch: Any) -> Any:
        def loss_fn() -> Any:
            return replicax.compute_average_loss(problem.losses([v.value for v in variables], *batch))

        loss, gradients = replicax.value_and_grad(loss_fn, variables)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return lambda: _steps._wait(strategy.run(step, args=(batch,)))


def measure_here(devices: int, turn: int, share: float) -> Any:
    replicax.use_cpu_devices(devices)
    found = []
    for name, make in PROBLEMS.items():
        problem = make()
        for sizes in SIZES[devices]:
            calls = [training(problem, sizes), training(problem, (max(sizes),) * len(sizes))]
            firsts = []
            for call in calls:
                for _ in range(2):
                    start = time.perf_counter()
                    call()
                    firsts.append(time.perf_counter() - start)
            times = _measure.interleave(calls, 6 * share)
            paired = _measure.Paired(*times)
            hundredth = times[0][min(100, len(times[0]) - 1)]
            found.append(
                {
                    "step": name,
                    "sizes": sizes,
                    "first_s": firsts[0],
                    "second_ms": firsts[1] * 1e3,
                    "hundredth_ms": hundredth * 1e3,
                    "first_even_s": firsts[2],
                    **paired.summary(),
                }
            )
    return found


def measure(rounds: int, share: float) -> dict[str, Any]:
    cases = [c for n in SIZES for c in _measure.in_subprocess("ragged.py", f"--devices={n}", f"--share={share}")]
    table = Table(title="A step on slices of different sizes (A), and on even ones of the largest size (B)")
    columns = "step", "slices", "first call A", "B", "second A", "hundredth A", "median A", "B", "ratio", "95%", ""
    for column in columns:
        table.add_column(column, justify="left" if column in ("step", "slices", "") else "right")
    for case in cases:
        low, high = case["ratio_95"]
        case["met"] = case["ratio"] <= BAR
        table.add_row(
            case["step"],
            ", ".join(map(str, case["sizes"])),
            f"{case['first_s']:.1f} s",
            f"{case['first_even_s']:.1f} s",
            f"{case['second_ms']:.1f} ms",
            f"{case['hundredth_ms']:.1f} ms",
            f"{case['a_ms']:.2f} ms",
            f"{case['b_ms']:.2f} ms",
            f"{case['ratio']:.2f}",
            f"{low:.2f}–{high:.2f}",
            "pass" if case["met"] else "MISSED",
        )
    Console(width=130).print(table)
    return {"bar": BAR, "cases": cases}


if __name__ == "__main__":
    results = _measure.measured(__doc__ or "", "a third", measure_here, measure, 1, 0.3)
    _measure.write("ragged.json", results)
    sys.exit(0 if all(case["met"] for case in results["cases"]) else 1)
