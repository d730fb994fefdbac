"""What a step of Flax NNX costs under Replicax, against NNX by itself.

    python benchmarks/models.py [--quick]

``strategy.run`` with a model, its optimizer and its metrics as arguments, against the fast way of NNX: ``nnx.split``
once, a step under ``jax.jit`` that merges and returns the new state; and against ``nnx.jit``. One device, the same step
but for the loss's share. Prints a table, writes ``results/models.json``, and exits with 1 if a bar is missed. See
README.md.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import _measure

ROUNDS = 3
"""Each case is measured in that many processes."""


@dataclasses.dataclass(frozen=True)
class Case(_measure.Case):
    """A comparison of training with an NNX model.

    Attributes:
      against: ``"merge"`` or ``"jit"``.
      width: of the eight layers.
    """

    against: str
    width: int


CASES = tuple(
    Case(f"{against}_{width}", f"8 layers of {width}, over {title}", bar, 8.0, against, width)
    for against, title, bar in (("merge", "split/merge in jax.jit", 1.05), ("jit", "nnx.jit", None))
    for width in (32, 512)
)


# --- one process ----------------------------------------------------------------------------------------


def measure_here(devices: int, turn: int, share: float) -> dict[str, Any]:
    """Measure every case in this process."""
    import replicax

    replicax.use_cpu_devices(devices)
    makers = {"merge": _merging, "jit": _jitted}
    results = {}
    for case in CASES:
        sides = [_replicax, makers[case.against]]
        made = {i: sides[i](case.width) for i in ((1, 0) if turn % 2 else (0, 1))}
        results[case.name] = _measure.interleave([made[0], made[1]], case.seconds * share)
    return results


def _objects(width: int) -> tuple[Any, Any, Any]:
    import optax
    from flax import nnx

    rngs = nnx.Rngs(0)
    model = nnx.Sequential(*(layer for _ in range(8) for layer in (nnx.Linear(width, width, rngs=rngs), nnx.relu)))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), nnx.metrics.Average("loss")


def _step(average: Callable[[Any], Any], model: Any, optimizer: Any, metric: Any, x: Any) -> Any:
    from flax import nnx

    loss, gradients = nnx.value_and_grad(lambda model: average(((model(x) - 1) ** 2).mean(-1)))(model)
    metric.update(loss=loss)
    optimizer.update(model, gradients)
    return loss


def _batch(width: int) -> Any:
    import jax

    return jax.random.normal(jax.random.key(0), (32, width))


def _replicax(width: int) -> Callable[[], None]:
    import replicax

    strategy, objects, x = replicax.MirroredStrategy(["cpu:0"]), _objects(width), _batch(width)

    def step(model: Any, optimizer: Any, metric: Any, x: Any) -> Any:
        return _step(replicax.compute_average_loss, model, optimizer, metric, x)

    return lambda: strategy.run(step, args=(*objects, x)).block_until_ready()


def _merging(width: int) -> Callable[[], None]:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    graphdef, state = nnx.split(_objects(width))
    x = _batch(width)

    @functools.partial(jax.jit, static_argnums=0)
    def step(graphdef: Any, state: Any, x: Any) -> Any:
        objects = nnx.merge(graphdef, state)
        loss = _step(jnp.mean, *objects, x)
        return nnx.state(objects), loss

    def call() -> None:
        nonlocal state
        state, loss = step(graphdef, state, x)
        loss.block_until_ready()

    return call


def _jitted(width: int) -> Callable[[], None]:
    import jax.numpy as jnp
    from flax import nnx

    objects, x = _objects(width), _batch(width)
    step = nnx.jit(functools.partial(_step, jnp.mean))
    return lambda: step(*objects, x).block_until_ready()


# --- all of it ------------------------------------------------------------------------------------------


def measure(rounds: int, share: float) -> dict[str, Any]:
    """Measure all cases, each in ``rounds`` processes."""
    found: dict[str, list[Any]] = {case.name: [] for case in CASES}
    for turn in range(rounds):
        options = ("--devices", "1", "--turn", str(turn), "--share", str(share))
        for name, times in _measure.in_subprocess("models.py", *options).items():
            found[name].append(times)
    return {case.name: _measure.of_all_processes(found[case.name]).summary() for case in CASES}


def main() -> int:
    results = _measure.measured(__doc__ or "", "a fifth", measure_here, measure, ROUNDS, 0.3)
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Time of a step of Flax NNX: medians, and the median of paired ratios")
    for column in ("strategy.run", "Replicax", "NNX", "ratio", "95%", "bar", ""):
        table.add_column(column, justify="left" if column == "strategy.run" else "right")
    for case in CASES:
        table.add_row(case.title, *_measure.cells(results[case.name], case.bar))
    Console(width=110).print(table)
    _measure.write("models.json", {"cases": results})
    return int(not all(_measure.meets(results[case.name], case.bar) for case in CASES))


if __name__ == "__main__":
    sys.exit(main())
