"""A small run under any strategy, which tests save, restore and go on with."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax

EXAMPLES = np.arange(96, dtype=np.float32)


@dataclasses.dataclass
class Run:
    """A model with batch statistics, an optimizer, a metric, and examples in a shuffled order."""

    strategy: replicax.Strategy
    model: dict[str, Any]
    optimizer: replicax.Optimizer
    loss: replicax.Mean
    data: Any
    checkpoint: replicax.Checkpoint

    @classmethod
    def of(
        cls,
        strategy: replicax.Strategy,
        batch: int = 8,
        seed: int = 0,
        splits: bool = False,
        data: Any = None,
        **more: Any,
    ) -> Self:
        """A run at its beginning.

        Args:
          strategy: of its variables and its data.
          batch: the size of the global batch.
          seed: of the initial values.
          splits: whether the largest variable is split over the logical devices of each replica.
          data: an iterator, if it is to be another one.
          more: objects that are saved, too.
        """
        generator = np.random.default_rng(seed)
        with strategy.scope():
            split = {"partition_dimensions": [2, 1]} if splits else {}
            model = {
                "w": replicax.Variable(generator.normal(size=(20, 30)).astype(np.float32), name="w", **split),
                "b": replicax.Variable(jnp.zeros(30, jnp.bfloat16), name="b"),
                "seen": replicax.Variable(0, synchronization="on_read", aggregation="sum"),
                "mean": replicax.Variable(0.0, synchronization="on_read", aggregation="mean"),
                "key": replicax.Variable(jax.random.key(seed)),
            }
            optimizer = replicax.Optimizer(optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda n: -0.01)))
            loss = replicax.Mean("loss")
        if data is None:
            examples = strategy.make_numpy_dataset(EXAMPLES).shuffle(seed=3).batch(batch)
            data = iter(strategy.distribute_dataset(examples))
        checkpoint = replicax.Checkpoint(model=model, optimizer=optimizer, loss=loss, data=data, step=0, **more)
        return cls(strategy, model, optimizer, loss, data, checkpoint)

    def step(self, x: Any) -> Any:
        trained = {name: self.model[name] for name in ("w", "b")}

        def loss() -> Any:
            scores = (
                x[:, None] / 96.0 * self.model["w"].value[0][None] + self.model["b"].value.astype(jnp.float32)[None]
            )
            return replicax.compute_average_loss(((scores - 1.0) ** 2).mean(1))

        _value, gradients = replicax.value_and_grad(loss, trained)()
        self.optimizer.apply_gradients(gradients, trained)
        self.loss.update(x)
        self.model["seen"].assign_add(x.shape[0])
        number = jnp.asarray(replicax.get_replica_context().replica_id_in_sync_group)
        self.model["mean"].assign(number.astype(jnp.float32) * 6.0)  # whose mean is exact

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.strategy.run(self.step, args=(next(self.data),))
            self.checkpoint.step += 1

    def values(self) -> dict[str, Any]:
        """All that is saved, without the place of the iterator."""
        return {
            **{name: plain(variable) for name, variable in self.model.items()},
            **{f"slot {i}": plain(slot) for i, slot in enumerate(self.optimizer.variables)},
            "loss": float(self.loss.result()),
            "step": self.checkpoint.step,
        }

    def coming(self) -> list[float]:
        """The next examples; the iterator goes on."""
        x = next(self.data)
        whole = self.strategy.gather(x, axis=0) if self.strategy.num_replicas_in_sync > 1 else x
        return [float(value) for value in np.asarray(whole)]


def plain(variable: Any) -> Any:
    value = variable.read_value()
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(value)).tolist()
    return np.asarray(value).tolist()
