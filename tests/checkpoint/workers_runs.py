"""What workers do in the tests of checkpoints."""

from __future__ import annotations

import logging
import os
import pathlib
from typing import Any

import jax
import numpy as np

import replicax
from tests.checkpoint.runs import Run, plain


def place(folder: str, shared: bool) -> str:
    """Where this worker writes: one folder for all, or one for each."""
    return folder if shared else os.path.join(folder, f"disk-{jax.process_index()}")


def everything(folder: str, shared: bool) -> dict[str, Any]:
    """A run with a manager, which is saved, and restored by another run of the same workers."""
    run = Run.of(replicax.MultiWorkerMirroredStrategy())
    where = place(folder, shared)
    manager = replicax.CheckpointManager(run.checkpoint, where, every_steps=2, max_to_keep=2)
    run.go(1)
    saved = [manager.save(1)]
    run.go(1)
    saved.append(manager.save(2))
    values = run.values()
    coming = run.coming()
    manager.close()
    own = pathlib.Path(where) / "step-00000002"
    files = sorted(str(path.relative_to(own)) for path in own.rglob("*") if path.is_file())
    other = Run.of(run.strategy, batch=4, seed=1)
    restored = replicax.CheckpointManager(other.checkpoint, where).restore_latest()
    return {
        "saved": saved,
        "values": values,
        "coming": coming,
        "files": files,
        "restored": restored,
        "same": other.values() == values,
        "goes_on": other.coming() == coming[:4],
        "names": sorted(os.listdir(where)),
    }


def restored(path: str, batch: int) -> tuple[dict[str, Any], list[float]]:
    """What these workers get of a checkpoint."""
    run = Run.of(replicax.MultiWorkerMirroredStrategy(), batch=batch, seed=1)
    run.checkpoint.restore(path)
    return run.values(), run.coming()


def latest(folders: list[str], step: int | None = None) -> tuple[Any, Any, list[str], bool]:
    """What these workers restore from a folder each; and then they save there."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Handler()
    logging.getLogger("replicax").addHandler(handler)
    try:
        run = Run.of(replicax.MultiWorkerMirroredStrategy(), seed=1)
        manager = replicax.CheckpointManager(run.checkpoint, folders[jax.process_index()])
        try:
            found = manager.restore_latest()
        except replicax.errors.CheckpointError as error:
            return str(error), None, messages, False
        values = run.values()
        manager.save(step or (found or 0) + 10)
        manager.close()
        again = Run.of(run.strategy, seed=2)
        replicax.CheckpointManager(again.checkpoint, folders[jax.process_index()]).restore_latest()
        return found, values, messages, again.values() == values
    finally:
        logging.getLogger("replicax").removeHandler(handler)


def large(folder: str, shared: bool) -> list[Any]:
    """Who writes how much of variables that all have, and of copies that each has."""
    strategy = replicax.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = [replicax.Variable(np.full((100, 100), i, np.float32)) for i in range(10)]
        copies = replicax.Variable(np.zeros(2500, np.float32), synchronization="on_read")
    strategy.run(lambda: copies.assign(copies * 0.0 + number()))
    path = os.path.join(place(folder, shared), "large")
    checkpoint = replicax.Checkpoint(model=model, copies=copies)
    checkpoint.save(path)
    sizes = {
        part: sum(file.stat().st_size for file in (pathlib.Path(path) / part).rglob("*") if file.is_file())
        for part in os.listdir(path)
        if part.startswith("arrays-")
    }
    strategy.run(lambda: copies.assign(copies * 0.0))
    for variable in model:
        variable.assign(np.zeros((100, 100), np.float32))
    checkpoint.restore(path)
    return [sizes, [plain(v)[0][0] for v in model], [x[::700].tolist() for x in strategy.local_results(copies)]]


def number() -> jax.Array:
    return replicax.get_replica_context().replica_id_in_sync_group.astype(np.float32)[None] + 1.0


def misuses(folder: str) -> list[str]:
    """What is said if the workers don't do the same, or one of them can't."""
    me = jax.process_index()
    found = []

    def tried(make: Any) -> None:
        try:
            make()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("nothing")

    checkpoint = replicax.Checkpoint(model=Run.of(replicax.MultiWorkerMirroredStrategy()).model)
    blocked = os.path.join(folder, "blocked")
    if me == 1:
        pathlib.Path(blocked).write_text("")
    tried(lambda: checkpoint.save(os.path.join(blocked if me == 1 else folder, "a")))
    tried(lambda: checkpoint.restore(os.path.join(folder, "nowhere")))
    tried(lambda: replicax.CheckpointManager(checkpoint, blocked if me == 1 else folder))
    checkpoint.save(os.path.join(folder, "b"))
    tried(lambda: checkpoint.save(os.path.join(folder, "b")))
    if me == 1:
        from replicax.checkpoint import saving

        write = saving.write_pieces

        def fails(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        saving.write_pieces = fails
    try:
        tried(lambda: checkpoint.save(os.path.join(folder, "c")))
    finally:
        if me == 1:
            saving.write_pieces = write
    checkpoint.save(os.path.join(folder, "d"))
    checkpoint.restore(os.path.join(folder, "d"))
    other = replicax.Checkpoint(**{"model" if me == 0 else "modell": checkpoint.model})
    tried(lambda: other.save(os.path.join(folder, "e")))
    return found


def global_arrays(folder: str, shared: bool) -> list[Any]:
    """An array of which each worker has a part, and arrays and a variable without a strategy: before one that has it,
    and the variable alone.
    """
    strategy = replicax.MultiWorkerMirroredStrategy()
    with strategy.scope():
        all_have = replicax.Variable(1.0)
    mesh = jax.sharding.Mesh(np.array(strategy.extended.worker_devices), "x")
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    values = np.arange(8, dtype=np.float32)
    array = jax.make_array_from_callback((8,), split, lambda index: values[index])
    zeros = jax.make_array_from_callback((8,), split, lambda index: values[index] * 0)
    path = os.path.join(place(folder, shared), "global")
    key = jax.random.key(5)  # of this worker only, but the same on all
    own = replicax.Variable(values + 1)
    replicax.Checkpoint(own=own, all_have=all_have, array=array, here=values, step=3, key=key).save(path)
    own, zero = replicax.Variable(values * 0), jax.random.key(0)
    checkpoint = replicax.Checkpoint(own=own, all_have=all_have, array=zeros, here=values * 0, step=0, key=zero)
    checkpoint.restore(path)
    assert jax.random.key_data(checkpoint.key).tolist() == [0, 5]
    assert own.numpy().tolist() == list(range(1, 9))
    replicax.Checkpoint(own=own).save(path + "_own")
    own.assign(own * 0)
    replicax.Checkpoint(own=own).restore(path + "_own")
    assert own.numpy().tolist() == list(range(1, 9))
    parts = [shard.data.tolist() for shard in checkpoint.array.addressable_shards]
    return [parts, checkpoint.here.tolist(), checkpoint.step]


def seconds(folder: str) -> list[int]:
    """The calls at which a manager saves that goes by the clock, with clocks that differ."""
    run = Run.of(replicax.MultiWorkerMirroredStrategy())
    from replicax.checkpoint import manager as manager_module

    class Clock:
        now = 0.0

        @classmethod
        def monotonic(cls) -> float:
            return cls.now

    real = manager_module.time
    manager_module.time = Clock  # type: ignore[assignment]
    try:
        manager = replicax.CheckpointManager(replicax.Checkpoint(w=run.model["w"]), folder, every_seconds=30.0)
        found = []
        for step in range(1, 101):
            Clock.now += 1.0 if jax.process_index() == 0 else 7.0  # the chief's is the one that counts
            found += [step] if manager.save(step) else []
        manager.close()
        return found
    finally:
        manager_module.time = real
