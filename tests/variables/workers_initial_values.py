"""What the workers of ``test_initial_values_of_workers.py`` do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import replicax


def split_variables() -> list[list[list[float]]]:
    """Variables split over two logical devices, whose initial value has another second part on worker 1."""
    strategy = replicax.MultiWorkerMirroredStrategy(["cpu:0", "cpu:1"], num_logical_devices=2)
    value = np.zeros((4, 2), np.float32)
    value[2:] = jax.process_index()
    with strategy.scope():
        mirrored = replicax.Variable(value, partition_dimensions=[2, 1])
        copies = replicax.Variable(value, partition_dimensions=[2, 1], synchronization="on_read")
    return [np.asarray(own).tolist() for v in (mirrored, copies) for own in strategy.local_results(v)]


def from_an_array_of_all() -> list[list[float]]:
    """Variables with the value of an array of which each worker has a part, and the worker's part, after a step."""
    strategy = replicax.MultiWorkerMirroredStrategy()
    own = np.arange(2, dtype=np.float32) + 2 * jax.process_index()
    split = jax.NamedSharding(strategy.extended.mesh, jax.P(replicax.REPLICA_AXIS))
    array = jax.make_array_from_process_local_data(split, own)
    with strategy.scope():
        kinds = replicax.Variable, replicax.variables.ShardedVariable
        variables = [kind(initial) for kind in kinds for initial in (array, np.zeros(4, np.float32))]
    for v in variables[1::2]:
        v.assign(array)
    strategy.run(lambda: [v.assign_add(jnp.ones(4)).value for v in variables])
    parts = [shard.data for shard in array.addressable_shards]
    return [*(v.numpy().tolist() for v in variables), np.concatenate(parts).tolist()]
