"""Checkpoints of workers that are threads, each with a folder of its own or with one that they share."""

from __future__ import annotations

import errno
import os
import pathlib
import threading
import time
from typing import Any

import numpy as np
import pytest

import replicax
from replicax.checkpoint import restoration, saving
from replicax.checkpoint.retention import Folder
from replicax.checkpoint.snapshot import Snapshot
from replicax.checkpoint.storage.shared_disks import groups_sharing
from replicax.workers.lockstep import Lockstep
from tests.simulated_workers import SimulatedWorkers, run


def checkpoint_of(worker: SimulatedWorkers, **objects: Any) -> replicax.Checkpoint:
    checkpoint = replicax.Checkpoint(**objects)
    checkpoint._lockstep = Lockstep(worker, timeout=10.0)
    return checkpoint


def damage(path: pathlib.Path) -> None:
    (path / "index.json").write_text("")


def test_only_the_worker_that_makes_room_looks_whether_a_place_is_free(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_room = Folder.make_room

    def late(*args: Any) -> None:
        time.sleep(0.2)  # the other worker comes first
        make_room(*args)

    def goes_on(worker: SimulatedWorkers) -> tuple[int | None, tuple[int, ...]]:
        manager = replicax.CheckpointManager(checkpoint_of(worker, x=np.arange(3.0)), tmp_path)
        found = manager.restore_latest()
        manager.save(2)
        manager.close()
        return found, manager.steps

    with replicax.CheckpointManager(replicax.Checkpoint(x=np.arange(3.0)), tmp_path) as manager:
        manager.save(1)
        manager.save(2)
    damage(tmp_path / "step-00000002")
    monkeypatch.setattr(Folder, "make_room", late)
    assert run(SimulatedWorkers.of(2), goes_on) == [(1, (1, 2))] * 2
    assert (tmp_path / "step-00000002.damaged-1").exists()


def test_a_checkpoint_goes_to_own_disks_and_then_to_one_that_all_share(tmp_path: pathlib.Path) -> None:
    for disk in ("disk-0", "disk-1", "shared"):
        (tmp_path / disk).mkdir()

    def saves(worker: SimulatedWorkers) -> list[float]:
        checkpoint = checkpoint_of(worker, x=np.arange(3.0), y=np.ones(2))
        for folder in (f"disk-{worker.index}", "shared"):
            checkpoint.save(tmp_path / folder / "a")
        checkpoint.x = checkpoint.x * 0
        checkpoint.restore(tmp_path / "shared" / "a")
        return checkpoint.x.tolist()

    assert run(SimulatedWorkers.of(2), saves) == [[0.0, 1.0, 2.0]] * 2
    assert sorted(path.name for path in (tmp_path / "shared" / "a").iterdir()) == [
        "arrays-0", "arrays-1", "index.json", "manifest.json"
    ]  # fmt: skip


def test_workers_with_a_new_disk_know_the_same_checkpoints(tmp_path: pathlib.Path) -> None:
    def goes_on(worker: SimulatedWorkers) -> list[Any]:
        folder = tmp_path / f"disk-{worker.index}"
        manager = replicax.CheckpointManager(checkpoint_of(worker, x=np.arange(3.0)), folder, best=("loss", "min"))
        before = manager.steps, manager.latest_step, manager.best_step
        manager.restore_latest()
        manager.save(3, {"loss": 2.0})
        manager.close()
        return [*before, manager.steps, manager.best_step]

    with replicax.CheckpointManager(replicax.Checkpoint(x=np.arange(3.0)), tmp_path / "disk-0") as manager:
        manager.save(1, {"loss": 1.0})
        manager.save(2, {"loss": 3.0})
    assert run(SimulatedWorkers.of(2), goes_on) == [[(1, 2), 2, 1, (1, 2, 3), 1]] * 2


@pytest.mark.parametrize("fault", ["other objects", "no memory"])
def test_a_fault_on_a_disk_is_told_on_all_others_at_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Workers 0 and 1 share a disk, and worker 2 has its own."""
    combined = Snapshot.pieces

    def pieces(self: Snapshot, everyones: Any, worker: int) -> Any:
        if fault == "no memory" and worker == 1:
            raise MemoryError("no memory for the copies")
        return combined(self, everyones, worker)

    def saves(worker: SimulatedWorkers) -> str:
        folder = tmp_path / ("own" if worker.index == 2 else "shared")
        name = "y" if fault == "other objects" and worker.index == 1 else "x"
        with pytest.raises(replicax.errors.CheckpointError) as error:
            checkpoint_of(worker, **{name: np.arange(3.0)}).save(folder / "a")
        return str(error.value).replace(str(folder), "…")

    monkeypatch.setattr(saving, "PATIENCE", 5.0)
    monkeypatch.setattr(Snapshot, "pieces", pieces)
    [message] = set(run(SimulatedWorkers.of(3), saves))
    expected = {
        "other objects": "worker 1 saves other objects than worker 0, or they lie elsewhere there; all workers must "
        "save the same",
        "no memory": "on worker 1: MemoryError: no memory for the copies",
    }
    assert message == f"the checkpoint …/a could not be written: {expected[fault]}"
    assert list(tmp_path.glob("*/*")) == []


def test_a_worker_that_could_not_write_says_why_although_another_does_not_come(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, gave_up = saving._write_own, threading.Event()

    def fails(save: saving.Save, *args: Any) -> Any:
        if save.worker == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        gave_up.wait(10.0)
        return write(save, *args)

    def saves(worker: SimulatedWorkers) -> None:
        why = "No space left on device" if worker.index == 1 else "came too late"
        with pytest.raises(replicax.errors.CheckpointError, match=f"a could not be written: .*{why}"):
            checkpoint_of(worker, x=np.arange(3.0)).save(tmp_path / "a")
        gave_up.set()

    monkeypatch.setattr(saving, "PATIENCE", 0.5)
    monkeypatch.setattr(saving, "_write_own", fails)
    run(SimulatedWorkers.of(2), saves)


@pytest.mark.parametrize("count", [1, 2])
def test_what_appears_meanwhile_in_the_place_of_a_checkpoint_stays(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    finish = saving._finish

    def late(save: saving.Save, *args: Any) -> None:
        os.mkdir(save.path)
        pathlib.Path(save.path, "notes").touch()
        finish(save, *args)

    def saves(worker: SimulatedWorkers) -> None:
        with pytest.raises(replicax.errors.CheckpointError, match="a could not be written: .*not empty.*another run"):
            checkpoint_of(worker, x=np.arange(3.0)).save(tmp_path / "a")

    monkeypatch.setattr(saving, "_finish", late)
    run(SimulatedWorkers.of(count), saves)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["a", "a/notes"]


def test_a_disk_has_no_checkpoint_that_another_could_not_finish(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = saving._finish

    def fails(save: saving.Save, *args: Any) -> None:
        if save.worker == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finish(save, *args)

    def saves(worker: SimulatedWorkers) -> None:
        with pytest.raises(replicax.errors.CheckpointError, match="on worker 1: OSError: .*No space left on device"):
            checkpoint_of(worker, x=np.arange(3.0)).save(tmp_path / f"disk-{worker.index}" / "a")

    monkeypatch.setattr(saving, "_finish", fails)
    run(SimulatedWorkers.of(2), saves)
    assert list(tmp_path.glob("*/*")) == []


def test_bytes_that_have_changed_on_one_disk_come_from_the_other(tmp_path: pathlib.Path) -> None:
    def saves(worker: SimulatedWorkers) -> None:
        checkpoint_of(worker, x=np.arange(3.0)).save(tmp_path / f"disk-{worker.index}" / "a")

    def restores(worker: SimulatedWorkers) -> list[float]:
        checkpoint = checkpoint_of(worker, x=np.zeros(3))
        checkpoint.restore(tmp_path / f"disk-{worker.index}" / "a")
        checkpoint.x += worker.index  # it is the worker's own
        return checkpoint.x.tolist()

    run(SimulatedWorkers.of(2), saves)
    for path in (tmp_path / "disk-0" / "a" / "arrays-0").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[::-1])
    assert run(SimulatedWorkers.of(2), restores) == [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]


def test_a_disk_that_fails_in_a_restore_is_told_on_all_workers(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = restoration.read_pieces

    def fails(requests: Any) -> Any:
        if any("disk-1" in folder and key == "1" for folder, key, *_ in requests):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(requests)

    def goes_on(worker: SimulatedWorkers) -> str:
        checkpoint = checkpoint_of(worker, x=np.arange(3.0), y=np.arange(3.0))
        checkpoint.save(tmp_path / f"disk-{worker.index}" / "a")
        with pytest.raises(replicax.errors.CheckpointError) as error:
            checkpoint.restore(tmp_path / f"disk-{worker.index}" / "a")
        return str(error.value)

    monkeypatch.setattr(restoration, "read_pieces", fails)
    monkeypatch.setattr(restoration, "BATCH", 1)
    [message] = set(run(SimulatedWorkers.of(2), goes_on))
    assert f"restoring {tmp_path}/disk-1/a was broken off at y: [Errno 5] Input/output error" in message


def test_a_worker_that_can_not_write_into_its_folder_is_told_on_all(tmp_path: pathlib.Path) -> None:
    def looks(worker: SimulatedWorkers) -> None:
        folder = tmp_path / ("nowhere" if worker.index == 1 else "")
        with pytest.raises(FileNotFoundError, match=f"{tmp_path}/nowhere") as error:
            groups_sharing(str(folder), Lockstep(worker, timeout=10.0))
        notes = getattr(error.value, "__notes__", [])
        assert ["on worker 1, at" in note for note in notes] == [True] * (worker.index == 0)

    run(SimulatedWorkers.of(2), looks)
    assert list(tmp_path.iterdir()) == []
