"""What the training loop costs, and what it saves.

    python benchmarks/loop.py [--quick]
    CASES=bf16_1,tracker_1 python benchmarks/loop.py    # some of the cases

``replicax.train`` against a bare ``for`` with ``strategy.run``, both on an endless dataset: runs of so many steps in
turn, each until its last step is done. The loop writes CSV files, and event files if tensorboardX is there; the bare
loop writes nothing and looks at no value, unless the table says so. Half precision and gradient accumulation: a bare
loop over the wrapped step against one over the same step written by hand. A tracker: the loop with one that logs every
tenth step against the loop without (W&B offline, if the package is there; its own process does not count).

Compared is the time for which processors work, in all threads of the process: what else runs on the machine does not
count. Of it, "Python" is the thread that runs the loop. Prints a table, writes ``results/loop.json``, and exits with 1
if a bar is missed. See README.md.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import _measure
from _measure import Paired
from steps import _mlp, _replicax

ROUNDS = 3
"""Each case is measured in that many processes."""


@dataclasses.dataclass(frozen=True)
class Case(_measure.Case):
    """A comparison of runs.

    Attributes:
      devices: on how many.
      width: of the hidden layers of the model.
      steps: of a run.
      steps_per_call: of the loop; ``None``: it chooses.
      log_every: after how many steps the loop logs.
      looks: whether the bare loop looks at the loss as often, and waits for it.
      wrapped: ``"bf16"``, ``"accumulate"`` or ``"tracker"``: what is compared with the same by hand, or without.
    """

    devices: int
    width: int
    steps: int
    steps_per_call: int | None
    log_every: int
    looks: bool
    wrapped: str = ""


CASES = (
    Case("small_1", "small steps, one by one", None, 8.0, 1, 16, 1000, 1, 100, False),
    Case("small_20", "small steps, 20 at once", 0.9, 8.0, 1, 16, 1000, 20, 100, False),
    Case("large_1", "784-512-512-10", 1.05, 8.0, 1, 512, 100, None, 20, False),
    Case("large_2", "784-512-512-10", 1.05, 8.0, 2, 512, 100, None, 20, False),
    Case("looks_1", "the same, every loss logged", None, 8.0, 1, 512, 100, None, 1, True),
    Case("bf16_1", 'Precision("bf16")', 1.02, 8.0, 1, 512, 50, None, 0, False, "bf16"),
    Case("accumulate_1", "accumulated(step, 4)", 1.02, 8.0, 1, 512, 50, None, 0, False, "accumulate"),
    Case("accumulate_2", "accumulated(step, 4)", 1.02, 8.0, 2, 512, 50, None, 0, False, "accumulate"),
    Case("tracker_1", "a tracker, every tenth step", 1.01, 8.0, 1, 512, 100, None, 10, False, "tracker"),
)
if "CASES" in os.environ:
    CASES = tuple(case for case in CASES if case.name in os.environ["CASES"].split(","))
PARTS = 4
"""How many micro-batches a batch is split into."""


# --- one process ----------------------------------------------------------------------------------------


def measure_here(devices: int, turn: int, share: float) -> dict[str, Any]:
    """Measure every case that runs on ``devices`` devices, in this process."""
    import replicax

    replicax.use_cpu_devices(devices)
    results = {}
    for case in CASES:
        if case.devices == devices:
            makers: list[Callable[[Case], Callable[[], None]]] = [_loop, _by_hand]
            if case.wrapped == "tracker":
                if importlib.util.find_spec("wandb") is None:
                    continue
                makers = [functools.partial(_tracked, with_tracker=on) for on in (True, False)]
            elif case.wrapped:
                makers = [functools.partial(_wrapped, by_hand=on) for on in (False, True)]
            made = {i: makers[i](case) for i in ((1, 0) if turn % 2 else (0, 1))}
            spent: list[list[tuple[float, float]]] = [[], []]
            calls = [_timed(made[i], spent[i]) for i in (0, 1)]
            waited = _measure.interleave(calls, case.seconds * share, warmup=2)
            results[case.name] = {
                "times": [[all_threads / case.steps for all_threads, _ in mine[2:]] for mine in spent],
                "python": [[python / case.steps for _, python in mine[2:]] for mine in spent],
                "wall": [[seconds / case.steps for seconds in mine] for mine in waited],
            }
    return results


def _timed(call: Callable[[], None], spent: list[tuple[float, float]]) -> Callable[[], None]:
    """``call``, which notes how long processors have worked: in all threads of this process, and in its own."""

    def timed() -> None:
        before = time.process_time(), time.thread_time()
        call()
        spent.append((time.process_time() - before[0], time.thread_time() - before[1]))

    return timed


def _loop(case: Case) -> Callable[[], None]:
    import replicax

    _, step, batches, _ = _replicax(_mlp(case.width))
    folder = tempfile.mkdtemp()

    def one(batch: Any) -> Any:
        return step(*batch)

    def call() -> None:
        replicax.train(
            one,
            batches,
            case.steps,
            log_every=case.log_every,
            logs=folder,
            steps_per_call=case.steps_per_call,
            progress=False,
        )

    return call


def _by_hand(case: Case) -> Callable[[], None]:
    import jax

    strategy, step, batches, _ = _replicax(_mlp(case.width))

    def call() -> None:
        for number in range(1, case.steps + 1):
            share = strategy.run(step, args=next(batches))
            if case.looks and number % case.log_every == 0:
                float(share)
        jax.block_until_ready(getattr(share, "values", share))

    return call


def _wrapped(case: Case, by_hand: bool) -> Callable[[], None]:
    """A bare loop over a step in half precision, or over micro-batches: by a wrapper of the loop's, or by hand."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    import replicax

    problem = _mlp(case.width)
    strategy = replicax.MirroredStrategy()
    with strategy.scope():
        variables = [replicax.Variable(value) for value in problem.initial]
        optimizer = replicax.Optimizer(problem.tx)
    rows = len(problem.pool[0][0])

    def step(x: Any, y: Any) -> Any:
        share, grads = replicax.value_and_grad(
            lambda: replicax.compute_average_loss(problem.losses(variables, x, y)), variables
        )()
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return share

    def half_by_hand(x: Any, y: Any) -> Any:
        def loss_of() -> Any:
            half = [v.value.astype(jnp.bfloat16) for v in variables]
            return replicax.compute_average_loss(problem.losses(half, x.astype(jnp.bfloat16), y))

        share, grads = replicax.value_and_grad(loss_of, variables)()
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return share.astype(jnp.float32)

    def parts_by_hand(x: Any, y: Any) -> Any:
        params = [v.value for v in variables]

        def add(sums: Any, part: Any) -> Any:
            found = jax.value_and_grad(lambda params: problem.losses(params, *part).sum() / rows)(params)
            return jax.tree.map(jnp.add, sums, found), None

        parts = jax.tree.map(lambda a: a.reshape(PARTS, -1, *a.shape[1:]), (x, y))
        zeros = jnp.zeros(()), [jnp.zeros_like(p) for p in params]
        (share, grads), _ = lax.scan(add, zeros, parts)
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return share

    if by_hand:
        chosen: Any = half_by_hand if case.wrapped == "bf16" else parts_by_hand
    elif case.wrapped == "bf16":
        chosen = replicax.loop.Precision("bf16")(step)
    else:
        chosen = replicax.loop.accumulated(step, PARTS)

    def endless() -> Iterator[Any]:
        yield from itertools.cycle(problem.pool)

    batches = iter(strategy.distribute_dataset(endless))

    def call() -> None:
        for _ in range(case.steps):
            share = strategy.run(chosen, args=next(batches))
        jax.block_until_ready(getattr(share, "values", share))

    return call


def _tracked(case: Case, with_tracker: bool) -> Callable[[], None]:
    import replicax

    _, step, batches, _ = _replicax(_mlp(case.width))
    tracker = _tracker() if with_tracker else None

    def one(batch: Any) -> Any:
        return step(*batch)

    def call() -> None:
        replicax.train(
            one,
            batches,
            case.steps,
            log_every=case.log_every,
            callbacks=tracker or (),
            steps_per_call=1,
            progress=False,
        )

    return call


def _tracker() -> Any:
    """A tracker whose run goes on over all measured runs: what is compared is what logging costs."""
    import wandb

    from replicax.loop import WandbLog

    run = wandb.init(mode="offline", dir=tempfile.mkdtemp(), settings=wandb.Settings(silent=True))

    class Open(WandbLog):
        def on_start(self, _: Any) -> None:
            self.run = run

        def on_end(self, _: Any) -> None:
            pass

    return Open()


# --- all of it ------------------------------------------------------------------------------------------


def measure(rounds: int, share: float) -> dict[str, Any]:
    """Measure all cases, each in ``rounds`` processes."""
    found: dict[str, list[Any]] = {case.name: [] for case in CASES}
    for turn in range(rounds):
        for devices in sorted({case.devices for case in CASES}):
            options = ("--devices", str(devices), "--turn", str(turn), "--share", str(share))
            for name, result in _measure.in_subprocess("loop.py", *options).items():
                found[name].append(result)
    results = {}
    for case in CASES:
        if not found[case.name]:
            continue  # a package is not there
        paired = _measure.of_all_processes([result["times"] for result in found[case.name]])
        python, wall = (
            [statistics.median(t for result in found[case.name] for t in result[kind][i]) for i in (0, 1)]
            for kind in ("python", "wall")
        )
        by_process = [Paired(*result["times"]).ratio for result in found[case.name]]
        results[case.name] = {
            **paired.summary(),
            "ratios_of_processes": by_process,
            "python_us": [t * 1e6 for t in python],
            "wall_ms": [t * 1e3 for t in wall],
        }
    return results


def main() -> int:
    results = _measure.measured(__doc__ or "", "a third", measure_here, measure, ROUNDS, 0.4)
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Processor time of a step: medians, and the median of paired ratios")
    for column in ("replicax.train", "devices", "train", "by hand", "ratio", "95%", "bar", "", "Python", "wall"):
        table.add_column(column, justify="left" if column == "replicax.train" else "right")
    cases = [case for case in CASES if case.name in results]
    for case in cases:
        found = results[case.name]
        table.add_row(
            case.title,
            str(case.devices),
            *_measure.cells(found, case.bar),
            "{:.0f} / {:.0f} µs".format(*found["python_us"]),
            "{:.2f} / {:.2f} ms".format(*found["wall_ms"]),
        )
    console = Console(width=130)
    console.print(table)
    _measure.write("loop.json", {"cases": results})
    return int(not all(_measure.meets(results[case.name], case.bar) for case in cases))


if __name__ == "__main__":
    sys.exit(main())
