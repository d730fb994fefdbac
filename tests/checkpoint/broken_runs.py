"""A run that stops at some point of a save or a restore, for tests to kill it there."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import numpy as np

import replicax
from replicax.checkpoint import restoration, saving

POINTS = ["begun", "pieces", "manifest", "renamed", "deleting", "restore"]


def stop_at(point: str, steps_before: int) -> None:
    """From the save after so many on, the process stops when it has come to a point, and says so."""
    counts = {"saves": 0}

    def stopping(module: Any, name: str, before: bool) -> None:
        original = getattr(module, name)

        def stopped(*args: Any) -> Any:
            result = None if before else original(*args)
            if counts["saves"] > steps_before:
                print("stopped", flush=True)
                time.sleep(600)
            return original(*args) if before else result

        setattr(module, name, stopped)

    carry_out = saving.carry_out

    def counted(*args: Any) -> None:
        counts["saves"] += 1
        carry_out(*args)

    from replicax.checkpoint import checkpoint

    checkpoint.carry_out = counted
    if point == "begun":
        stopping(saving, "write_pieces", True)
    elif point == "pieces":
        stopping(saving, "write_pieces", False)
    elif point == "manifest":
        stopping(os, "rename", True)
    elif point == "renamed":
        stopping(os, "rename", False)
    elif point == "deleting":
        import shutil

        stopping(shutil, "rmtree", True)
    else:
        counts["saves"] = steps_before + 1
        stopping(restoration, "read_pieces", False)


def interrupted(folder: str) -> None:
    """Is interrupted while it waits for a save, which then comes to its end all the same."""
    is_interrupted = threading.Event()
    write = saving.write_pieces

    def waiting(*args: Any) -> None:
        print("stopped", flush=True)
        assert is_interrupted.wait(60)
        write(*args)

    saving.write_pieces = waiting
    checkpoint = replicax.Checkpoint(v=replicax.Variable(np.full(1000, 7, np.float32)))
    try:
        checkpoint.save(os.path.join(folder, "step-00000001"))
    except KeyboardInterrupt:
        is_interrupted.set()
        raise


def main(point: str, folder: str) -> None:
    replicax.use_cpu_devices(2)
    if point == "interrupted":
        interrupted(folder)
    with replicax.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        v = replicax.Variable(np.zeros(1000, np.float32))
    manager = replicax.CheckpointManager(replicax.Checkpoint(v=v), folder, max_to_keep=2)
    stop_at(point, 2)
    start = manager.restore_latest() or 0
    for step in range(start + 1, 10):
        v.assign(np.full(1000, step, np.float32))
        manager.save(step)
        manager.wait()
    print("not stopped", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
