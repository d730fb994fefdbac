"""Replicax, on emulated CPU devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax
from tests.oracle import workers_on_replicax
from tests.oracle.library import Library

MOST_REPLICAS = 4

replicax.use_cpu_devices(MOST_REPLICAS)


PARTITIONERS = {
    "fixed": replicax.variables.FixedShardsPartitioner(2),
    "least": replicax.variables.MinSizePartitioner(min_shard_bytes=16, max_shards=2),
    "largest": replicax.variables.MaxSizePartitioner(max_shard_bytes=32),
}


class Replicax(Library):
    """See :class:`Library`."""

    on_workers = workers_on_replicax
    _coordinators: ClassVar[dict[str, Any]] = {}
    distribute = replicax
    clusters = replicax

    def new_strategy(self, replicas: int) -> Any:
        return replicax.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])

    def set_strategy(self, strategy: Any) -> None:
        replicax.set_strategy(strategy)

    def is_per_replica(self, value: Any) -> bool:
        return isinstance(value, replicax.PerReplica)

    def coordinator(self, parts: str = "whole") -> Any:
        if parts not in self._coordinators:
            strategy = replicax.ParameterServerStrategy(
                num_workers=2, num_servers=2, variable_partitioner=PARTITIONERS.get(parts)
            )
            self._coordinators[parts] = replicax.ClusterCoordinator(strategy)
        return self._coordinators[parts]

    def _shards(self, variable: Any) -> Any:
        [coordinator] = [c for c in self._coordinators.values() if c.strategy is variable.strategy]
        coordinator.schedule(lambda: None).fetch()  # the servers have it now
        return coordinator._cluster.home.definitions.shards[variable.number]

    def servers_of(self, variable: Any) -> list[int]:
        return list(self._shards(variable).servers)

    def shapes_of_parts(self, variable: Any) -> list[list[int]]:
        return [list(part.shape) for part in self._shards(variable).parts(variable.numpy()).values()]

    @classmethod
    def close(cls) -> None:
        for coordinator in cls._coordinators.values():
            coordinator.close()

    def towers(self) -> Any:
        from replicax.compat import v1

        return v1.MirroredStrategy([f"cpu:{i}" for i in range(self.replicas)])

    def tower_context(self) -> Any:
        from replicax.compat import v1

        return v1.get_tower_context()

    def tower_script(self) -> tuple[Any, Any]:
        from examples import towers

        return towers, self.towers()

    def array(self, value: Any) -> Any:
        return jnp.asarray(value)

    def variable(
        self, value: Any, synchronization: str = "auto", aggregation: str = "none", trainable: bool | None = None
    ) -> Any:
        return replicax.Variable(value, trainable=trainable, synchronization=synchronization, aggregation=aggregation)

    def total(self, array: Any) -> Any:
        return jnp.sum(array)

    def to_float(self, array: Any) -> Any:
        return jnp.asarray(array, jnp.float32)

    def value_and_grad(self, loss: Callable[[], Any], variables: Sequence[Any]) -> tuple[Any, list[Any]]:
        value, gradients = replicax.value_and_grad(loss, list(variables))()
        return value, gradients

    def derivative(self, fn: Callable[[Any], Any], at: Any) -> Any:
        return jax.grad(fn)(at)

    def average_loss(self, losses: Any, sample_weight: Any = None, global_batch_size: int | None = None) -> Any:
        return replicax.compute_average_loss(losses, sample_weight, global_batch_size)

    def regularization(self, loss: Any) -> Any:
        return replicax.scale_regularization_loss(loss)

    def optimizer(self, rule: str) -> Any:
        match rule:
            case "sgd":
                return replicax.Optimizer(optax.sgd(0.1))
            case "momentum":
                return replicax.Optimizer(optax.sgd(0.1, momentum=0.9))
            case "adam":
                return replicax.Optimizer(optax.adam(0.1, eps=1e-8))
        raise ValueError(rule)

    def dataset(self, examples: Any, batch: int) -> Any:
        whole = jax.tree.map(np.asarray, examples)
        return self.strategy.make_numpy_dataset(whole).batch(batch)
