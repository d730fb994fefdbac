"""Small things to train."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax
from tests.conftest import logical_strategy, strategy_of

STRATEGIES = {
    "one device": lambda: replicax.OneDeviceStrategy("cpu:0"),
    "mirrored 1": lambda: strategy_of(1),
    "mirrored 2": lambda: strategy_of(2),
    "sharded 4": lambda: replicax.ShardedStrategy([f"cpu:{i}" for i in range(4)]),
    "tpu": lambda: replicax.TPUStrategy(replicax.TPUClusterResolver(emulate="2x1x1x1")),
    "logical 2x2": lambda: logical_strategy(2, 2),
    "central 2": lambda: replicax.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}


@dataclasses.dataclass
class Line:
    """A line through points, fitted by Adam."""

    strategy: replicax.Strategy

    def __post_init__(self) -> None:
        with self.strategy.scope():
            self.w = replicax.Variable(np.zeros((4, 1), np.float32), name="w")
            self.optimizer = replicax.Optimizer(optax.adam(0.05))
            self.seen = replicax.Variable(0, name="seen", synchronization="on_read", aggregation="sum")
            self.mean = replicax.Mean("mean loss")

    def losses(self, batch: Any) -> Any:
        return jnp.square(batch["x"] @ self.w - batch["y"])[:, 0]

    def step(self, batch: Any) -> Any:
        def loss() -> Any:
            losses = self.losses(batch)
            self.mean.update(losses)
            return replicax.compute_average_loss(losses)

        share, [gradient] = replicax.value_and_grad(loss, [self.w])()
        self.optimizer.apply_gradients([(gradient, self.w)])
        self.seen.assign_add(jnp.int32(batch["x"].shape[0]))
        return {"loss": share, "first weight": self.w.value[0, 0]}

    def evaluate(self, batch: Any) -> Any:
        return replicax.compute_average_loss(self.losses(batch))

    def batches(self, sizes: tuple[int, ...] = (8, 8, 8, 8, 8)) -> list[dict[str, np.ndarray]]:
        rng = np.random.default_rng(0)
        true = np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)
        xs = [rng.normal(size=(n, 4)).astype(np.float32) for n in sizes]
        return [{"x": x, "y": x @ true} for x in xs]

    def dataset(self, sizes: tuple[int, ...] = (8, 8, 8, 8, 8), options: Any = None) -> replicax.DistributedDataset:
        return self.strategy.distribute_dataset(self.batches(sizes), options)

    def state(self) -> list[np.ndarray]:
        slots = [np.asarray(v.read_value()) for v in self.optimizer.variables]
        return [self.w.numpy(), *slots, np.asarray(self.seen.read_value())]


class Recorder(replicax.Callback):
    """Writes down what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.evaluated: list[tuple[int, dict[str, float]]] = []
        self.saved: list[int] = []

    def on_start(self, run: replicax.TrainingRun) -> None:
        self.calls.append(("start", run.step))

    def on_log(self, run: replicax.TrainingRun, step: int, values: Any) -> None:
        self.calls.append(("log", step, run.step))
        self.logged.append((step, {k: v for k, v in values.items() if k != "examples_per_second"}))

    def on_evaluation(self, run: replicax.TrainingRun, step: int, values: Any) -> None:
        self.calls.append(("evaluation", step, run.step))
        self.evaluated.append((step, dict(values)))

    def on_save(self, run: replicax.TrainingRun, step: int) -> None:
        self.calls.append(("save", step, run.step))
        self.saved.append(step)

    def on_end(self, run: replicax.TrainingRun) -> None:
        self.calls.append(("end", run.step))

    def set_state(self, state: Any) -> None:
        assert state is not None  # as it has none


def by_hand(line: Line, dataset: Any, steps: int) -> list[float]:
    """The same steps by ``strategy.run``; their losses."""
    losses: list[float] = []
    while True:
        for batch in dataset:
            if len(losses) == steps:
                return losses
            out = line.strategy.run(line.step, args=(batch,))
            share = out["loss"]
            if isinstance(share, replicax.PerReplica):
                share = line.strategy.reduce("sum", share)
            losses.append(float(jax.device_get(share)))
