"""Writes the checkpoints of this folder, which tests restore for ever.

    python tests/checkpoint/saved/save.py FORMAT

Run it when the format gets another number, and keep what is here: old checkpoints stay readable.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax


def objects(strategy: replicax.Strategy) -> dict[str, Any]:
    """One of each kind, with values that are not those of the start."""
    with strategy.scope():
        w = replicax.Variable(np.arange(12, dtype=np.float32).reshape(4, 3), name="w")
        model = {
            "w": w,
            "half": replicax.Variable(jnp.full(5, 1.5, jnp.bfloat16)),
            "key": replicax.Variable(jax.random.key(11)),
            "total": replicax.Variable(0.0, synchronization="on_read", aggregation="sum").assign(7.0),
        }
        optimizer = replicax.Optimizer(optax.sgd(0.1, momentum=0.9))
        optimizer.build([w])
        optimizer.variables[0].assign(np.full((4, 3), 0.25, np.float32))
        loss = replicax.Mean("loss")
        loss.variables["total"].assign(6.0)
        loss.variables["weight"].assign(4.0)
    examples = strategy.make_numpy_dataset(np.arange(24, dtype=np.float32)).shuffle(seed=5).batch(4)
    data = iter(strategy.distribute_dataset(examples))
    next(data)
    return {
        "model": model,
        "optimizer": optimizer,
        "loss": loss,
        "data": data,
        "array": jnp.arange(3),
        "host": np.array([1.0, float("nan")]),
        "step": 12,
        "note": "größer",
        "rate": float("inf"),
        "nothing": None,
    }


def main(folder: str) -> None:
    strategy = replicax.MultiWorkerMirroredStrategy()
    name = "one-process" if jax.process_count() == 1 else f"{jax.process_count()}-workers"
    replicax.Checkpoint(**objects(strategy)).save(pathlib.Path(folder) / name)


if __name__ == "__main__":
    replicax.use_cpu_devices(2)
    main(str(pathlib.Path(__file__).with_name(f"format-{sys.argv[1]}")))
