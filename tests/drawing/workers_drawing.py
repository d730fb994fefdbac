"""What the workers of ``test_placement_picture.py`` do."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp

import replicax


def draw_alone(folder: pathlib.Path) -> int:
    """Only the second worker draws, a variable that is in pieces on both; returns how many replicas there are."""
    strategy = replicax.ShardedStrategy(num_logical_devices=2)
    with strategy.scope():
        w = replicax.Variable(lambda: jnp.ones((64, 128)), name="w", partition_dimensions=[1, 2])
    program = strategy.extended.trace(lambda x: x @ w, args=(jax.ShapeDtypeStruct((4, 64), jnp.float32),))
    if strategy.extended.workers.index == 1:
        strategy.extended.plot(folder / "picture.svg", program)
    return strategy.num_replicas_in_sync
