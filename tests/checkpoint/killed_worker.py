"""Two workers of which one is killed while it saves; the other says what it is told."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from typing import Any

import jax
import numpy as np

import replicax
from replicax.checkpoint import saving


def main(address: str, worker: int, folder: str, point: str) -> None:
    replicax.use_cpu_devices(1)
    jax.distributed.initialize(address, 2, worker, initialization_timeout=60)
    with replicax.MultiWorkerMirroredStrategy().scope():
        model = [replicax.Variable(np.full(1000, i, np.float32)) for i in range(4)]
    checkpoint = replicax.Checkpoint(model=model)
    manager = replicax.CheckpointManager(checkpoint, folder)
    manager.save(1)
    manager.wait()
    owner, name, call = {"writing": (saving, "write_pieces", 1), "written": (saving._Exchange, "gather", 3)}[point]
    do, calls = getattr(owner, name), itertools.count(1)

    def killed(*args: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return do(*args)

    if worker == 1:
        setattr(owner, name, killed)
    manager.save(2)
    if worker == 1:
        time.sleep(60)
    try:
        manager.wait()
    except replicax.errors.CheckpointError as error:
        print(f"TOLD {error}", flush=True)
    os._exit(0)  # JAX would wait for the other


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
