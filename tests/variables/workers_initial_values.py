"""What the workers of ``test_initial_values_of_workers.py`` do."""

from __future__ import annotations

import jax
import numpy as np

import replicax
from replicax.strategies.multi_worker import in_lockstep


def split_variables() -> list[list[list[float]]]:
    """Variables split over two logical devices, whose initial value has another second part on worker 1."""
    lockstep, devices = in_lockstep(jax.local_devices()[:2])
    strategy = replicax.Strategy(
        replicax.StrategyExtended(np.array(devices, dtype=object).reshape(-1, 2), lockstep=lockstep)
    )
    value = np.zeros((4, 2), np.float32)
    value[2:] = jax.process_index()
    with strategy.scope():
        mirrored = replicax.Variable(value, partition_dimensions=[2, 1])
        copies = replicax.Variable(value, partition_dimensions=[2, 1], synchronization="on_read")
    return [np.asarray(own).tolist() for v in (mirrored, copies) for own in strategy.local_results(v)]
