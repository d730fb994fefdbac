"""What workers do in test_placed_programs.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import replicax
from replicax.variables.partitioners import over_all


def weights() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(8, 8)) / 3).astype(np.float32) for _ in range(2)]


def batch() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)


def train(steps: int, splits: bool = False) -> tuple[list[float], list[np.ndarray], str]:
    """A pipeline of two stages, one replica on each worker: losses, weights, and the error for replicas on both."""
    lockstep = replicax.MultiWorkerMirroredStrategy().extended.lockstep
    pieces = over_all(2, min_bytes=0)
    devices = np.array(sorted(jax.devices(), key=lambda d: (d.process_index, d.id))).reshape(-1, 2)
    strategy = replicax.Strategy(replicax.StrategyExtended(devices, pieces if splits else None, lockstep=lockstep))
    with strategy.scope():
        first, second = (replicax.Variable(w, name=f"w{k}") for k, w in enumerate(weights()))
    rows = np.split(batch(), len(devices))
    x = strategy.distribute_values_from_function(lambda ctx: rows[ctx.replica_id_in_sync_group])

    def step(x):
        def loss_of():
            total = 0.0
            for part in jnp.split(x, 2):
                h = strategy.assign_to_logical_device(jnp.tanh(part @ first), 1)
                total += replicax.compute_average_loss(((h @ second) ** 2).mean(-1), global_batch_size=8)
            return total

        replica = replicax.get_replica_context()
        loss, gradients = replicax.value_and_grad(loss_of, [first, second])()
        for w, g in zip((first, second), replica.all_reduce("sum", gradients), strict=True):
            w.assign_sub(0.1 * g)
        return replica.all_reduce("sum", loss)

    losses = [float(strategy.run(step, args=(x,))) for _ in range(steps)]
    shards = [[s.device.id for s in w.slot.array.addressable_shards] for w in (first, second)]
    assert [d.id for d in devices[jax.process_index()]] == [i for ids in shards for i in ids]
    assert all(w.slot.array.addressable_data(0).shape == ((4, 8) if splits else (8, 8)) for w in (first, second))
    across = replicax.Strategy(replicax.StrategyExtended(devices.T, lockstep=lockstep))
    try:
        across.run(lambda x: across.assign_to_logical_device(x, 1), args=(1.0,))
    except replicax.errors.PlacementError as error:
        return losses, [w.numpy() for w in (first, second)], str(error)
    raise AssertionError("a replica's logical devices were on two workers")
