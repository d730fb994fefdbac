"""What each rule for XLA's CPU backend gains, and what it costs: every rule alone, against none of them.

    python benchmarks/cpu_rules.py [--quick] [--rules SmallSums …] [--programs peers.cnn …] [--devices 2] [--loops]

The programs are those of the gallery, the peers' models, and ten for which no rule was written
(``_cpu_programs.py``). Each has a process of its own. A step's inputs are recorded, then the step is compiled without
any rule and with each rule that has something to do in it; the compiled programs are run in turn. As ``program ×5`` it
is five steps in one loop, as ``run_steps`` has them. A cell is the median of paired ratios: how many times quicker the
step is with the rule. In brackets: processor time of tracing and compiling it with the rule / without. A rule stays if
it gains 1.2 × on at least three programs, loses more than 3% on none, and does not slow the first call.

Prints a table, and writes ``results/cpu_rules.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent.parent))

import _measure
from _measure import Paired

GALLERY = (
    ("nnx.cnn", {"epochs": 1, "steps": 3}),
    *((name, {"steps": 3}) for name in ("nnx.gpt", "nnx.vit", "nnx.diffusion", "equinox.cnn", "equinox.rnn")),
    *((name, {"steps": 3}) for name in ("equinox.bert", "linen.vae", "linen.resnet", "linen.seq2seq")),
    ("pytrees.two_tower", {"steps": 3}),
)
PEERS = ("mlp", "cnn", "transformer")
STEPS = 5
"""Of a loop."""
GAIN, LOSS, SLOWER = 1.2, 0.97, 1.03
"""The bars of a step's ratio, and of the first call's."""


def names() -> list[str]:
    import _cpu_programs

    return [
        *(f"gallery.{name}" for name, _ in GALLERY),
        *(f"peers.{name}" for name in PEERS),
        *(f"own.{name}" for name in _cpu_programs.PROGRAMS),
    ]


# --- one process ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Recorded:
    """A step's program, and what it was called with."""

    program: Any
    mesh: Any
    inputs: Any


def recorded(name: str, devices: int) -> Recorded:
    """The step that a program runs, with its third call's inputs."""
    import jax

    import replicax
    from replicax.execution import run as runs

    replicax.use_cpu_devices(devices)
    found: list[Recorded] = []
    replicate = runs.replicate

    def recording(program: Any, mesh: Any, steps: int | None = None) -> Any:
        executable = replicate(program, mesh, steps)
        call = executable.call

        def noted(*groups: Any) -> Any:
            copies = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, groups)
            found.append(Recorded(program, mesh, copies))
            return call(*groups)

        return dataclasses.replace(executable, call=noted)

    runs.replicate = recording
    strategy = replicax.MirroredStrategy()
    with contextlib.redirect_stdout(io.StringIO()):
        group, _, rest = name.partition(".")
        if group == "gallery":
            importlib.import_module(f"examples.gallery.{rest}").main(strategy, **dict(GALLERY)[rest])
        else:
            step, batch = _of_peers(rest, strategy) if group == "peers" else _own(rest, strategy)
            [distributed] = strategy.distribute_dataset([batch])
            for _ in range(3):
                strategy.run(step, args=(distributed,))
    return max(found, key=lambda one: len(one.program.jaxpr.eqns))


def _of_peers(name: str, strategy: Any) -> Any:
    import replicax
    from benchmarks.peers import problems
    from benchmarks.peers.libraries import jax_models

    problem = problems.problem(name)
    with strategy.scope():
        params = replicax.as_variables(dict(problem.initial))
        optimizer = replicax.Optimizer(jax_models.adam())

    def step(batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return replicax.compute_average_loss(jax_models.LOSSES[name](params, *batch))

        loss, gradients = replicax.value_and_grad(loss_fn, params)(params)
        optimizer.apply_gradients(gradients, params)
        return loss

    return step, (problem.inputs, problem.labels)


def _own(name: str, strategy: Any) -> Any:
    import _cpu_programs
    import jax

    import replicax

    problem = _cpu_programs.PROGRAMS[name]()
    with strategy.scope():
        groups = [replicax.as_variables(dict(group)) for group in problem.initial]
        optimizers = [replicax.Optimizer(problem.tx) for _ in groups]

    def step(batch: Any) -> Any:
        losses = []
        for i, (group, optimizer, loss_of) in enumerate(zip(groups, optimizers, problem.losses, strict=True)):

            def loss_fn(mine: Any, i: int = i, loss_of: Any = loss_of) -> Any:
                values = [mine if j == i else jax.tree.map(lambda x: x, other) for j, other in enumerate(groups)]
                return replicax.compute_average_loss(loss_of(values, *batch))

            loss, gradients = replicax.value_and_grad(loss_fn, group)(group)
            optimizer.apply_gradients(gradients, group)
            losses.append(loss)
        return losses

    return step, problem.batch


def _sides(step: Recorded, steps: int | None, rules: list[Any]) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """The step compiled with no rule and with each that is for it, and the processor times of doing so."""
    from replicax.backends import BACKENDS
    from replicax.backends.cpu import CPU
    from replicax.execution.compiled.backend import Target
    from replicax.execution.compiled.replicate import replicate

    target = Target(in_a_loop=steps is not None)
    wanted = {r.__name__: (r,) for r in rules if r().is_wanted(step.program.jaxpr, target)}
    sides: dict[str, Any] = {}
    took: dict[str, list[float]] = {}
    kinds = {"": (), **wanted}
    for turn in range(2 if wanted else 0):
        for side in list(kinds) if turn else list(kinds)[::-1]:
            BACKENDS["cpu"] = CPU(kinds[side])
            start = time.process_time()
            executable = replicate(step.program, step.mesh, steps)
            compiled = executable.call.lower(*executable.inputs()).compile()
            took.setdefault(side, []).append(time.process_time() - start)
            sides[side] = executable, compiled
    return {side: sides[side] for side in kinds if side in sides}, took


def _call(executable: Any, compiled: Any, inputs: Any, steps: int | None) -> tuple[Callable[[], None], Any]:
    """What runs it once, and its results the first time."""
    import jax
    import numpy as np

    from replicax.locality import T

    donated, kept, arguments, constants = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, inputs)
    if steps is not None:
        several = []
        for value, aval, (_, locality) in zip(
            arguments, executable.inputs()[2], executable.program.arguments, strict=True
        ):
            dim = 1 if locality is T else 0
            whole = np.repeat(np.expand_dims(np.asarray(value), dim), steps, dim)
            several.append(jax.device_put(whole.astype(aval.dtype), aval.sharding))
        arguments = several
    first = jax.block_until_ready(compiled(donated, kept, arguments, constants))
    state = first[0][: len(donated)]
    kept_results = [np.asarray(x).astype(np.float64) for x in jax.tree.leaves(first) if _is_number(x)]

    def call() -> None:
        nonlocal state
        results = compiled(state, kept, arguments, constants)
        jax.block_until_ready(results)
        state = results[0][: len(donated)]

    return call, kept_results


def _is_number(x: Any) -> bool:
    import jax.numpy as jnp

    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def measure_here(name: str, devices: int, chosen: list[str], seconds: float, loops: bool) -> dict[str, Any]:
    """For each way of running it: the times with each rule and without."""
    from replicax.backends import cpu

    step = recorded(name, devices)
    rules = [r for r in cpu.RULES if not chosen or r.__name__ in chosen]
    found = {}
    for way, steps in (("", None), (f" ×{STEPS}", STEPS)):
        of_loops = [r for r in rules if loops or r is cpu.Convolutions]
        sides, took = _sides(step, steps, rules if steps is None else of_loops)
        if not sides:
            continue
        calls, first = zip(*(_call(*side, step.inputs, steps) for side in sides.values()), strict=True)
        times = _measure.interleave(calls, seconds * len(calls), warmup=3)
        found[name + way] = {
            side: {
                **Paired(times[0], mine).summary(),
                "first_call": min(took[side]) / min(took[""]),
                "difference": max(map(_difference, results, first[0]), default=0.0),
            }
            for side, mine, results in zip(sides, times, first, strict=True)
        }
    return found


def _difference(a: Any, b: Any) -> float:
    return float(abs(a - b).max() / max(abs(b).max(), 1e-6)) if a.size else 0.0


# --- all of them ----------------------------------------------------------------------------------------


def verdict(cells: list[dict[str, Any]]) -> str:
    """What becomes of a rule with these cells."""
    programs = {cell["program"].partition(" ")[0] for cell in cells if cell["ratio"] >= GAIN}
    losses = [cell for cell in cells if cell["ratio"] < LOSS]
    slower = [cell for cell in cells if cell["first_call"] > SLOWER]
    kept = len(programs) >= 3 and not losses and not slower
    return f"{'stays' if kept else 'goes'}: {len(programs)} gain, {len(losses)} lose, {len(slower)} start more slowly"


def by_rule(found: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    rules: dict[str, list[dict[str, Any]]] = {}
    for program, sides in found.items():
        for rule, cell in sides.items():
            if rule:
                rules.setdefault(rule, []).append({"program": program, **cell})
    return rules


def rows(found: dict[str, Any]) -> Iterator[list[str]]:
    """The table: a row for each program, then the verdicts."""
    rules = by_rule(found)
    yield ["program", "ms", *rules]
    for program, sides in found.items():
        yield [program, f"{sides['']['b_ms']:.2f}", *(_cell(sides.get(rule)) for rule in rules)]


def _cell(cell: dict[str, Any] | None) -> str:
    return "" if cell is None else f"{cell['ratio']:.2f} ({cell['first_call']:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description="What each rule for XLA's CPU backend gains and costs.")
    parser.add_argument("--quick", action="store_true", help="a third of the time, and noisier")
    parser.add_argument("--rules", nargs="+", default=[])
    parser.add_argument("--programs", nargs="+", default=[])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--loops", action="store_true", help="all rules in loops, too, and not only that for loops")
    parser.add_argument("--add", action="store_true", help="to the figures that are there, instead of anew")
    parser.add_argument("--here", help=argparse.SUPPRESS)  # one process of the measurement
    options = parser.parse_args()
    seconds = 0.3 if options.quick else 1.0
    if options.here:
        here = measure_here(options.here, options.devices, options.rules, seconds, options.loops)
        print(json.dumps(here))
        return
    path = _measure.RESULTS / "cpu_rules.json"
    found = json.loads(path.read_text())["programs"] if options.add and path.exists() else {}
    for name in options.programs or names():
        arguments = ["--here", name, "--devices", str(options.devices), *(["--quick"] if options.quick else [])]
        arguments += ["--loops"] if options.loops else []
        arguments += ["--rules", *options.rules] if options.rules else []
        done = _measure.in_subprocess("cpu_rules.py", *arguments)
        found.update({f"{key} on {options.devices}": value for key, value in done.items()})
        print(name, {k: {r: _cell(c) for r, c in v.items() if r} for k, v in done.items()}, flush=True)
    from rich.console import Console
    from rich.table import Table

    table = Table(title="How many times quicker a step is with each rule (first call with it / without)")
    header, *others = rows(found)
    for column in header:
        table.add_column(column, justify="left" if column == "program" else "right")
    for row in others:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    for rule, cells in by_rule(found).items():
        print(f"{rule} {verdict(cells)}")
    _measure.write("cpu_rules.json", {"programs": found})


if __name__ == "__main__":
    main()
