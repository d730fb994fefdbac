"""Padded batches for tests, made as a dataset that pads makes them, but that padding is NaN."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import replicax
from replicax.devices.mesh import REPLICA_AXIS
from replicax.execution.replica_values import example_mask
from replicax.values import padded


def sizes_of(size: int, rows: int, replicas: int) -> tuple[int, ...]:
    """How many of ``size`` examples each replica has, when they are dealt out in order."""
    return tuple(min(rows, max(0, size - rows * i)) for i in range(replicas))


def padded_batch(strategy: replicax.Strategy, tree: Any, rows: int) -> Any:
    """The arrays of ``tree`` as a padded batch of ``rows`` rows on each replica."""
    n, mesh = strategy.num_replicas_in_sync, strategy.extended.mesh
    size = len(jax.tree.leaves(tree)[0])

    def one(array: np.ndarray[Any, Any]) -> jax.Array:
        fill = np.nan if array.dtype.kind == "f" else 0
        whole = np.concatenate([array, np.full((n * rows - size, *array.shape[1:]), fill, array.dtype)])
        sharding = NamedSharding(mesh, PartitionSpec(REPLICA_AXIS))
        return jax.device_put(whole.reshape(n, rows, *array.shape[1:]), sharding)

    return padded(jax.tree.map(one, tree), example_mask(sizes_of(size, rows, n), rows, mesh))
