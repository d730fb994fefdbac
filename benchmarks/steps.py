"""What many steps per dispatch cost, and what they save.

    python benchmarks/steps.py [--quick]

``strategy.run_steps`` against a hand-written ``lax.scan`` inside ``jit(shard_map)``, and against ``strategy.run`` for
one element after the other. All sides read the same batches on the host and put them on the devices in the background.
Prints a table, writes ``results/steps.json``, and exits with 1 if a bar is missed. See README.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import _measure
from _measure import Paired

ROUNDS = 3
"""Each case is measured in that many processes."""


@dataclasses.dataclass(frozen=True)
class Case(_measure.Case):
    """A comparison of steps.

    Attributes:
      devices: on how many.
      steps: how many per dispatch.
      against: ``"scan"``, with groups of batches from the same kind of dataset; ``"staged"``, a scan with batches that
        a thread written by hand puts together; or ``"run"``.
      width: of the hidden layers of the model.
    """

    devices: int
    steps: int
    against: str
    width: int


CASES = (
    *(
        Case(f"scan_{n}x{k}", "over lax.scan by hand", 1.03, 8.0 if k < 100 else 20.0, n, k, "scan", 512)
        for n in (1, 2)
        for k in (1, 10, 100)
    ),
    Case("staged_100", "the same, with input by hand", None, 8.0, 1, 100, "staged", 512),
    *(Case(f"run_{k}", "over strategy.run, small", 0.6 if k == 100 else None, 4.0, 1, k, "run", 16) for k in (10, 100)),
)


# --- one process ----------------------------------------------------------------------------------------


def measure_here(devices: int, turn: int, share: float) -> dict[str, Any]:
    """Measure every case that runs on ``devices`` devices, in this process."""
    import replicax

    replicax.use_cpu_devices(devices)
    results = {}
    for case in CASES:
        if case.devices == devices:
            problem = _mlp(case.width)
            makers = [lambda p=problem, c=case: _many(p, c.steps)]
            others = {"scan": _by_hand, "staged": lambda p, k: _by_hand(p, k, staged=True), "run": _one_by_one}
            makers.append(lambda p=problem, c=case, o=others: o[c.against](p, c.steps))
            made = {i: makers[i]() for i in ((1, 0) if turn % 2 else (0, 1))}
            sides = [made[0], made[1]]
            times = _measure.interleave([s.call for s in sides], case.seconds * share, warmup=max(2, 20 // case.steps))
            results[case.name] = {
                "times": [[t / case.steps for t in mine] for mine in times],
                "waiting": sides[0].waiting(),
                "traces": sides[0].traces(),
            }
            for side in sides:
                side.close()
    return results


@dataclasses.dataclass
class Side:
    """One of the two ways to run ``steps`` steps."""

    call: Callable[[], None]
    close: Callable[[], None]
    waiting: Callable[[], float] = lambda: 0.0
    traces: Callable[[], int] = lambda: 1


@dataclasses.dataclass
class Problem:
    """A classifier, Adam, and batches that never end."""

    initial: list[Any]
    pool: list[tuple[Any, Any]]
    losses: Callable[..., Any]
    tx: Any


def _mlp(width: int) -> Problem:
    import jax
    import numpy as np
    import optax

    sizes = (784 if width > 64 else width), width, width, 10
    rng = np.random.default_rng(0)
    initial: list[Any] = []
    for n_in, n_out in itertools.pairwise(sizes):
        initial += [rng.normal(0, n_in**-0.5, (n_in, n_out)).astype(np.float32), np.zeros(n_out, np.float32)]
    rows = 128 if width > 64 else 8
    pool = [
        (rng.normal(size=(rows, sizes[0])).astype(np.float32), rng.integers(10, size=rows).astype(np.int32))
        for _ in range(16)
    ]

    def losses(params: Any, x: Any, y: Any) -> Any:
        w1, b1, w2, b2, w3, b3 = params
        x = jax.nn.relu(jax.nn.relu(x @ w1 + b1) @ w2 + b2)
        return optax.softmax_cross_entropy_with_integer_labels(x @ w3 + b3, y)

    return Problem(initial, pool, losses, optax.adam(1e-3))


def _replicax(problem: Problem) -> tuple[Any, Callable[[Any], Any], Any, list[None]]:
    import replicax

    strategy = replicax.MirroredStrategy()
    with strategy.scope():
        variables = [replicax.Variable(value) for value in problem.initial]
        optimizer = replicax.Optimizer(problem.tx)
    traces: list[None] = []

    def step(x: Any, y: Any) -> Any:
        traces.append(None)
        share, grads = replicax.value_and_grad(
            lambda: replicax.compute_average_loss(problem.losses(variables, x, y)), variables
        )()
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return share

    def batches() -> Iterator[Any]:
        yield from itertools.cycle(problem.pool)

    return strategy, step, iter(strategy.distribute_dataset(batches)), traces


def _many(problem: Problem, steps: int) -> Side:
    strategy, step, iterator, traces = _replicax(problem)

    def one(ctx: Any, x: Any, y: Any) -> None:
        ctx.set_last_step_output("loss", step(x, y), "sum")

    spent = {"waiting": 0.0, "all": 0.0}
    running = iterator._reader
    take = running.take

    def timed_take(*args: Any) -> Any:
        start = time.perf_counter()
        taken = take(*args)
        spent["waiting"] += time.perf_counter() - start
        return taken

    running.take = timed_take

    def call() -> None:
        start = time.perf_counter()
        strategy.run_steps(one, iterator, steps).last_step_outputs["loss"].block_until_ready()
        spent["all"] += time.perf_counter() - start

    return Side(call, iterator.close, lambda: spent["waiting"] / spent["all"], lambda: len(traces))


def _one_by_one(problem: Problem, steps: int) -> Side:
    import jax

    strategy, step, iterator, traces = _replicax(problem)

    def call() -> None:
        for _ in range(steps):
            share = strategy.run(step, args=next(iterator))
        jax.block_until_ready(share)

    return Side(call, iterator.close, traces=lambda: len(traces))


def _by_hand(problem: Problem, steps: int, staged: bool = False) -> Side:
    """What somebody who knows JAX would write: donated state, and a scan over batches that lie side by side.

    With ``staged`` a thread puts them there; without, they come from a dataset as those of ``run_steps`` do.
    """
    import jax
    import numpy as np
    import optax
    from jax import lax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    n = jax.device_count()
    spec = PartitionSpec("replica") if n > 1 else PartitionSpec()  # [devices, K, …]; on one device [K, …]
    mesh = Mesh(np.array(jax.devices()), ("replica",))
    everywhere, along = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, spec)
    params = jax.device_put(list(problem.initial), everywhere, may_alias=False)
    state = jax.device_put((params, problem.tx.init(params)), everywhere)
    rows = len(problem.pool[0][0])

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: problem.losses(p, *batch).sum() / rows)(params)
        loss, grads = lax.psum((loss, grads), "replica")
        updates, opt_state = problem.tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def many(state: Any, batches: Any) -> Any:
        state, losses = lax.scan(step, state, jax.tree.map(lambda x: x[0], batches) if n > 1 else batches)
        return state, losses[-1]

    mapped = jax.shard_map(
        many,
        mesh=mesh,
        in_specs=(PartitionSpec(), spec),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    jitted = jax.jit(mapped, donate_argnums=0, out_shardings=everywhere)

    next_group, close = _staged(problem, steps, along) if staged else _from_dataset(problem, steps)

    def call() -> None:
        nonlocal state
        state, loss = jitted(state, next_group())
        loss.block_until_ready()

    return Side(call, close)


def _from_dataset(problem: Problem, steps: int) -> tuple[Callable[[], Any], Callable[[], None]]:
    """Groups as ``run_steps`` gets them."""
    iterator = _replicax(problem)[2]

    def next_group() -> Any:
        [taken] = iterator._reader.take(steps, True).groups
        return tuple(taken.arrays)

    return next_group, iterator.close


def _staged(problem: Problem, steps: int, along: Any) -> tuple[Callable[[], Any], Callable[[], None]]:
    """Groups that a thread puts together, two ahead."""
    import jax
    import numpy as np

    n, rows = jax.device_count(), len(problem.pool[0][0])
    waiting: queue.Queue[Any] = queue.Queue(maxsize=2)
    closed = threading.Event()

    def stage() -> None:
        batches = itertools.cycle(problem.pool)
        while not closed.is_set():
            columns = zip(*itertools.islice(batches, steps), strict=True)
            split = [np.stack([a.reshape(n, rows // n, *a.shape[1:]) for a in column], axis=1) for column in columns]
            waiting.put(tuple(jax.device_put([s[0] for s in split] if n == 1 else split, along)))

    thread = threading.Thread(target=stage, daemon=True)
    thread.start()

    def close() -> None:
        closed.set()
        while thread.is_alive():
            while not waiting.empty():
                waiting.get_nowait()
            thread.join(0.01)

    return waiting.get, close


# --- all of them ----------------------------------------------------------------------------------------


def measure(rounds: int, share: float) -> dict[str, Any]:
    """Measure everything; every number of devices in processes of its own."""
    runs: dict[str, list[Any]] = {}
    for turn in range(rounds):
        for devices in sorted({case.devices for case in CASES}):
            arguments = ["--devices", str(devices), "--turn", str(turn), "--share", str(share)]
            for name, result in _measure.in_subprocess("steps.py", *arguments).items():
                runs.setdefault(name, []).append(result)
    return {"cases": [_summary(case, runs[case.name]) for case in CASES], "rounds": rounds}


def _summary(case: Case, results: list[Any]) -> dict[str, Any]:
    rounds = [Paired(*r["times"]) for r in results]
    together = _measure.of_all_processes([r["times"] for r in results])
    middle = statistics.quantiles(together.b, n=4) if len(together.b) > 1 else [together.b[0]] * 3
    return {
        **dataclasses.asdict(case),
        **together.summary(),
        "ratio_by_round": [r.ratio for r in rounds],
        "noise": (middle[2] - middle[0]) / middle[1],
        "waiting": statistics.median(r["waiting"] for r in results),
        "traces": max(r["traces"] for r in results),
        "passed": (case.bar is None or together.ratio <= case.bar) and all(r["traces"] == 1 for r in results),
    }


def show(results: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("run_steps")
    table.title = "Time of a step: medians, the median of paired ratios; noise: spread of the middle half by hand"
    for header in ("devices", "K", "run_steps", "other", "ratio", "95%", "bar", "noise", "waiting"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("")
    for case in results["cases"]:
        *compared, verdict = _measure.cells(case, case["bar"], case["passed"])
        table.add_row(
            case["title"],
            str(case["devices"]),
            str(case["steps"]),
            *compared,
            f"{case['noise']:.0%}",
            f"{case['waiting']:.1%}",
            verdict,
        )
    Console(width=None if sys.stdout.isatty() else 130).print(table)


def main() -> None:
    description = "What many steps per dispatch cost, and what they save."
    results = _measure.measured(description, "a fifth", measure_here, measure, ROUNDS, quick_share=0.4)
    show(results)
    _measure.write("steps.json", results)
    sys.exit(not all(case["passed"] for case in results["cases"]))


if __name__ == "__main__":
    main()
