"""What the workers of ``test_initial_values_of_workers.py`` do."""

from __future__ import annotations

import jax
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
