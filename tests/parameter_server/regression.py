"""A model to train in several ways: a step, its variables, and batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

import replicax


@dataclasses.dataclass
class Regression:
    """A linear regression under a strategy, which counts its updates."""

    w: replicax.Variable
    b: replicax.Variable
    iterations: replicax.Variable
    optimizer: replicax.Optimizer
    step: Callable[..., Any]

    @property
    def values(self) -> list[np.ndarray]:
        return [v.numpy() for v in (self.w, self.b, *self.optimizer.variables)]


def regression(strategy: replicax.Strategy, tx: Any = None) -> Regression:
    with strategy.scope():
        w = replicax.Variable(np.arange(10, dtype=np.float32).reshape(5, 2) / 10, name="w")
        b = replicax.Variable(np.zeros(2, np.float32), name="b")
        iterations = replicax.Variable(0, name="iterations")
        optimizer = replicax.Optimizer(optax.sgd(0.02, momentum=0.9) if tx is None else tx)

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        def loss() -> jax.Array:
            error = x @ w.value + b.value[None] - y
            return replicax.compute_average_loss((error**2).sum(-1))

        share, gradients = replicax.value_and_grad(loss, {"w": w, "b": b})()
        optimizer.apply_gradients(gradients, {"w": w, "b": b})
        iterations.assign_add(1)
        return share

    return Regression(w, b, iterations, optimizer, step)


def batches(steps: int, size: int = 8) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    for _ in range(steps):
        x = rng.normal(size=(size, 5)).astype(np.float32)
        yield x, (x @ np.ones((5, 2)) + rng.normal(size=(size, 2))).astype(np.float32)


def in_parts(batch: tuple[np.ndarray, ...], parts: int) -> Iterator[tuple[np.ndarray, ...]]:
    """What each worker gets of a global batch."""
    yield from zip(*(np.split(array, parts) for array in batch), strict=True)


def mirrored(replicas: int, steps: int, tx: Any = None) -> Regression:
    """The same, trained under MirroredStrategy."""
    strategy = replicax.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    model = regression(strategy, tx)
    for batch in strategy.distribute_dataset(list(batches(steps))):
        strategy.run(model.step, args=batch)
    return model
