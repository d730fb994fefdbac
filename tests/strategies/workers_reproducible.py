"""A training run with dropout, Adam and clipping, of which tests compare the bits."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax


def on_devices(replicas: int, devices: int, split: bool = False) -> replicax.Strategy:
    """A strategy whose steps have the same bits for any number of devices."""
    kind = replicax.ShardedStrategy if split else replicax.MirroredStrategy
    return kind([f"cpu:{i}" for i in range(devices)], num_replicas=replicas, reproducible=True)


def train_on_workers() -> list[list[bytes]]:
    """What three steps make of the variables, mirrored and split, of eight replicas on all workers."""
    with warnings.catch_warnings():
        # The process has done other tasks, with other numbers of threads.
        warnings.filterwarnings("ignore", "reproducible=True: XLA has [0-9]+ threads in this process")
        return [
            Training.of(kind(timeout_seconds=60, num_replicas=8, reproducible=True)).go(0, 3).bits()
            for kind in (replicax.MultiWorkerMirroredStrategy, replicax.ShardedStrategy)
        ]


@dataclasses.dataclass
class Training:
    """A run under any strategy."""

    strategy: Any
    variables: list[Any]
    step: Any
    checkpoint: replicax.Checkpoint

    @classmethod
    def of(cls, strategy: Any, seed: int = 0) -> Self:
        generator = np.random.default_rng(seed)
        with strategy.scope():
            w1 = replicax.Variable(generator.normal(size=(6, 16)).astype(np.float32), name="w1")
            w2 = replicax.Variable(generator.normal(size=(16, 3)).astype(np.float32), name="w2")
            b = replicax.Variable(np.zeros(3, np.float32), name="b")
            steps = replicax.Variable(0, name="steps")
            optimizer = replicax.Optimizer(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01)))
        weights = [w1, w2, b]

        def step(x: Any, y: Any) -> Any:
            replica = replicax.get_replica_context()
            assert replica is not None
            key = jax.random.fold_in(
                jax.random.fold_in(jax.random.key(0), steps.value), replica.replica_id_in_sync_group
            )

            def loss() -> Any:
                hidden = jax.nn.gelu(x @ w1)
                hidden = jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden / 0.9, 0.0)
                logits = hidden @ w2 + b.value[None]
                return replicax.compute_average_loss(optax.softmax_cross_entropy_with_integer_labels(logits, y))

            share, gradients = replicax.value_and_grad(loss, weights)()
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
            steps.assign_add(1)
            return share

        checkpoint = replicax.Checkpoint(weights=weights, steps=steps, optimizer=optimizer)
        return cls(strategy, [*weights, *optimizer.variables], step, checkpoint)

    def data(self, start: int, end: int) -> Any:
        """The global batches of some steps."""
        generators = [np.random.default_rng(i) for i in range(start, end)]
        batches = [
            (g.normal(size=(16, 6)).astype(np.float32), g.integers(3, size=16).astype(np.int32)) for g in generators
        ]
        return self.strategy.distribute_dataset(batches)

    def go(self, start: int, end: int) -> Self:
        """Do some steps."""
        with jax.numpy_dtype_promotion("standard"):  # which Optax's Adam needs
            for batch in self.data(start, end):
                self.strategy.run(self.step, args=batch)
        return self

    def bits(self) -> list[bytes]:
        """Those of all variables."""
        return [v.numpy().tobytes() for v in self.variables]
