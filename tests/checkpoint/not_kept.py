"""A program that saves a checkpoint, forgets it, and ends."""

from __future__ import annotations

import gc
import sys

import numpy as np

import replicax

if __name__ == "__main__":
    w = replicax.Variable(np.zeros(10_000_000, np.float32))
    replicax.Checkpoint(w=w).save(sys.argv[1], wait=False)
    gc.collect()
