"""A program that ends with iterators open."""

from __future__ import annotations

import numpy as np

import replicax

replicax.use_cpu_devices(2)
batches = replicax.MirroredStrategy().distribute_dataset([np.zeros(4)] * 100)
iterators = [iter(batches) for _ in range(4)]
print([next(iterator).values[0].shape for iterator in iterators])
