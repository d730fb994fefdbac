"""What ``test_placements.py`` does on each placement, in one process or as one of several workers."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax.devices.selection import grouped_by_replica
from replicax.strategies.multi_process import check_workers_agree
from replicax.system import packages
from replicax.variables.partitioners import over_all

REPLICAS = 4
LAYOUTS: dict[str, Any] = {
    "mirrored": None,
    "split": over_all(REPLICAS, min_bytes=0),
    "groups": replicax.variables.GroupPartitioner(2, over_all(2, min_bytes=0)),
}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adafactor": lambda: optax.adafactor(0.05, min_dim_size_to_factor=2),
    "adamw": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 1, 10), weight_decay=0.1),
    "if finite": lambda: optax.apply_if_finite(optax.adam(0.1), max_consecutive_errors=3),
    "lamb": lambda: optax.lamb(0.05),
    "lars": lambda: optax.lars(0.05, momentum=0.9),
    "momentum, clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)),
}
# The last ones can't be in as many parts or pieces of one size.
SHAPES: dict[str, tuple[tuple[int, ...], list[int] | None]] = {
    "a": ((6, 16), [1, 2]),
    "b": ((16,), [2]),
    "c": ((16, 8), [2, 1]),
    "odd": ((5, 3), None),
    "one": ((), None),
}
FACTORS = np.array([1.0, np.inf, 0.5], np.float32)
"""Of the loss, for the optimizer that leaves out what is not finite."""
RNG = np.random.default_rng(7)
INITIAL = {name: RNG.normal(size=shape).astype(np.float32) for name, (shape, _) in SHAPES.items()}
BATCHES = RNG.normal(size=(3, 8, 6)).astype(np.float32)


def placed(devices_here: int, logical: int, layout: str, per_device: int = 1) -> replicax.Strategy:
    """A strategy with so many devices on this worker, or groups of logical devices, and so many replicas on each."""
    mine = grouped_by_replica(jax.local_devices()[: devices_here * logical], logical)
    lockstep, grid = check_workers_agree(mine, 60)
    replicas = len(grid) * per_device
    return replicax.Strategy(replicax.StrategyExtended(grid, LAYOUTS[layout], lockstep=lockstep, num_replicas=replicas))


def variables_of(strategy: replicax.Strategy, name: str = "") -> dict[str, replicax.Variable]:
    in_parts = strategy.extended.num_logical_devices > 1
    with strategy.scope():
        return {
            key: replicax.Variable(INITIAL[key], name=f"{name}/{key}", partition_dimensions=parts if in_parts else None)
            for key, (_, parts) in SHAPES.items()
        }


def numbers(variables: dict[str, replicax.Variable]) -> dict[str, Any]:
    return {name: v.numpy() for name, v in variables.items()}


def train(strategy: replicax.Strategy, executor: Any, names: Sequence[str], folder: str) -> dict[str, Any]:
    """Losses, norms, parameters and slots; half of the way, all is saved, and gone through again."""
    options = replicax.RunOptions(executor)
    models = {name: variables_of(strategy, name) for name in names}
    with strategy.scope():
        optimizers = {name: replicax.Optimizer(OPTIMIZERS[name]()) for name in names}
        seen = replicax.Variable(0, name="seen", synchronization="on_read", aggregation="sum")
        average = replicax.Variable(0.0, name="average", synchronization="on_read", aggregation="mean")

    def step(x: Any, factor: Any) -> Any:
        seen.assign_add(x.shape[0])
        average.assign(x.mean())
        losses, norms = {}, {}
        for name, model in models.items():

            def loss(a: Any, b: Any, c: Any, odd: Any, one: Any, name: str = name) -> Any:
                y = jnp.tanh(x @ a.value + b.value[None]) @ c.value + odd.value.sum() * one.value
                return replicax.compute_average_loss((y**2).mean(-1) * (factor if name == "if finite" else 1.0))

            variables = list(model.values())
            losses[name], gradients = replicax.value_and_grad(loss, variables)(*variables)
            optimizers[name].apply_gradients(zip(gradients, variables, strict=True))
            norms[name] = optax.tree.norm([v.value for v in variables])
        return losses, norms

    found: list[Any] = []

    def go(number: int) -> None:
        [x] = strategy.distribute_dataset([BATCHES[number]])
        losses, norms = strategy.run(step, args=(x, FACTORS[number]), options=options)
        found.append((strategy.reduce("sum", losses), norms, int(seen), float(average)))

    go(0)
    everything = {"seen": seen, "average": average}
    for i, name in enumerate(names):
        everything |= {f"model{i}": models[name], f"optimizer{i}": optimizers[name]}
    checkpoint = replicax.Checkpoint(**everything)
    path = pathlib.Path(folder) / "saved"
    checkpoint.save(path)
    go(1)
    for model in models.values():
        for v in model.values():
            v.assign(jnp.full(v.shape, 9.0))
    checkpoint.restore(path)
    go(1)
    go(2)
    slots = {name: [v.numpy() for v in optimizer.variables] for name, optimizer in optimizers.items()}
    return {"steps": jax.tree.map(np.asarray, found), "models": {n: numbers(m) for n, m in models.items()}, **slots}


def use(strategy: replicax.Strategy, executor: Any) -> dict[str, Any]:
    """What reading, assigning and differentiating give, inside of a step and outside."""
    options = replicax.RunOptions(executor)
    variables = variables_of(strategy)
    a, b, c, odd, one = variables.values()
    found: list[Any] = [numbers(variables)]

    def step(x: Any) -> Any:
        a.assign_add(a.value * 0.5)
        odd.assign(odd.value.at[jnp.array([0, 4])].set(3.0))
        b.assign_sub(jnp.flip(b.value))
        _, gradients = replicax.value_and_grad(
            lambda: (
                replicax.compute_average_loss(jnp.sin(x @ a.value).sum(-1))
                + replicax.scale_regularization_loss(one.value * odd.value.max())
            ),
            [a, odd],
        )()
        gradients = replicax.get_replica_context().all_reduce("sum", gradients)
        return gradients, jnp.sort(odd.value, axis=0), jnp.linalg.norm(c.value), c.value[1:3].T

    [x] = strategy.distribute_dataset([BATCHES[0]])
    found.append(strategy.run(step, args=(x,), options=options))
    c.assign(INITIAL["c"] * 2.0)
    one.assign_add(1.0)
    b.assign(strategy.reduce("sum", strategy.run(lambda x: x.sum() * b.value, args=(x,), options=options)))
    found += [numbers(variables), a + 1.0, odd[1], c @ b.value[:8]]
    return jax.tree.map(np.asarray, {"use": found})


def go_through(
    devices_here: Sequence[int], logical: int, layout: str, executor: str, names: Any, folder: str, per_device: int = 1
) -> Any:
    """All of it, as the worker that this process is."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        strategy = placed(devices_here[jax.process_index()], logical, layout, per_device)
        return use(strategy, executor) | train(strategy, executor, names, folder)


def read_parts() -> tuple[list[Any], str]:
    """What each replica, and this worker, sees of a mirrored variable whose parts are on two logical devices."""
    strategy = placed(1, 2, "mirrored")
    with strategy.scope():
        v = replicax.Variable(INITIAL["a"], name="v", partition_dimensions=[1, 2])
    exactly = replicax.RunOptions("per_replica")
    doubled = strategy.run(lambda: v.assign_add(v.value).value + 0.0, options=exactly)
    return [np.asarray(doubled), v.numpy()], repr(v)


def disagree() -> list[str]:
    """What strategies say whose workers have chosen differently."""
    second = jax.process_index() == 1
    choices: list[dict[str, Any]] = [
        {"num_replicas": 8 if second else 4},
        {"num_replicas": 4 if second else None},
        {"num_replicas": 8, "replicas_at_once": 2 if second else 1},
        {"num_replicas": 8, "reproducible": second},
        {"num_logical_devices": 2 if second else 1},
        {},
    ]
    found = []
    for chosen in choices:
        version = packages.VERSION if chosen else "B" if second else "A"
        with mock.patch.object(packages, "VERSION", version), pytest.raises(RuntimeError) as caught:
            replicax.MultiWorkerMirroredStrategy(timeout_seconds=60, **chosen)
        found.append(str(caught.value))
    return found
