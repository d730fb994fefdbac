"""A save copies, returns, and writes in the background; it is there whole or not at all, and no failure is lost."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import logging
import os
import resource
import threading
import time

import numpy as np
import pytest

import replicax
from replicax.checkpoint import background_save, saving
from tests import processes
from tests.conftest import strategy_of


@contextlib.contextmanager
def files_up_to(size: int):
    """A disk that is full when a file has so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def gate(monkeypatch):
    """Writing waits at a gate: ``came`` says that it is there, and ``opened`` lets it go on."""
    came, opened = threading.Event(), threading.Event()
    write = saving.write_pieces

    def gated(folder, pieces):
        came.set()
        assert opened.wait(60)
        write(folder, pieces)

    monkeypatch.setattr(saving, "write_pieces", gated)
    yield came, opened
    opened.set()


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_is_saved_is_what_was_there_at_the_call(tmp_path, gate, replicas) -> None:
    came, opened = gate
    with strategy_of(replicas).scope():
        v = replicax.Variable(np.zeros(10_000, np.float32))
    array = np.zeros(5)
    checkpoint = replicax.Checkpoint(v=v, array=array, step=0)
    checkpoint.save(tmp_path / "a", wait=False)
    assert came.wait(60)
    for _ in range(3):  # steps take the memory of v
        v.strategy.run(lambda: v.assign_add(np.ones(10_000, np.float32)))
    array += 1
    checkpoint.step = 3
    assert not (tmp_path / "a").exists()
    opened.set()
    checkpoint.wait()
    assert float(v.value[0]) == 3.0
    checkpoint.restore(tmp_path / "a")
    assert not v.numpy().any()
    assert not checkpoint.array.any()
    assert checkpoint.step == 0


def test_a_step_that_is_not_saved_does_not_wait_for_the_save_of_another(tmp_path, gate) -> None:
    came, opened = gate
    checkpoint = replicax.Checkpoint(v=replicax.Variable(1.0))
    manager = replicax.CheckpointManager(checkpoint, tmp_path, every_steps=10)
    assert manager.save(10)
    assert came.wait(60)
    answers = []
    call = threading.Thread(target=lambda: answers.append(manager.save(11)))
    call.start()
    call.join(20)
    is_waiting = call.is_alive()
    opened.set()
    call.join()
    assert not is_waiting
    assert answers == [False]
    manager.close()


def test_one_save_at_a_time(tmp_path, gate) -> None:
    came, opened = gate
    checkpoint = replicax.Checkpoint(v=replicax.Variable(1.0))
    checkpoint.save(tmp_path / "a", wait=False)
    assert came.wait(60)
    second = threading.Thread(target=checkpoint.save, args=(tmp_path / "b",))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    assert [path.name.split(".")[0] for path in tmp_path.iterdir()] == ["a"]
    opened.set()
    second.join(60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_another_manager_of_the_folder_waits_for_it(tmp_path, gate) -> None:
    """As in a notebook, where a run is interrupted and begun again."""
    came, opened = gate
    checkpoint = replicax.Checkpoint(v=replicax.Variable(1.0))
    replicax.CheckpointManager(checkpoint, tmp_path).save(1)
    assert came.wait(60)
    threading.Timer(0.2, opened.set).start()
    manager = replicax.CheckpointManager(replicax.Checkpoint(v=replicax.Variable(2.0)), tmp_path)
    assert manager.restore_latest() == 1
    assert manager.save(2)
    manager.wait()


def test_it_is_written_though_nobody_keeps_its_checkpoint(tmp_path) -> None:
    processes.run_programs([[*processes.MODULE, "tests.checkpoint.not_kept", str(tmp_path / "a")]])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_full_disk(tmp_path) -> None:
    v = replicax.Variable(np.ones(100_000, np.float32))
    checkpoint = replicax.Checkpoint(v=v)
    with files_up_to(50_000):
        with pytest.raises(
            replicax.errors.CheckpointError,
            match=rf"checkpoint {tmp_path}/a could not be written: OSError: .*27. File too large",
        ):
            checkpoint.save(tmp_path / "a")
        assert list(tmp_path.iterdir()) == []
        checkpoint.save(tmp_path / "b", wait=False)
        with pytest.raises(replicax.errors.CheckpointError, match=r"b could not be written"):
            checkpoint.wait()
        checkpoint.wait()  # it is raised once
    assert list(tmp_path.iterdir()) == []
    checkpoint.save(tmp_path / "a")
    checkpoint.restore(tmp_path / "a")


@pytest.mark.parametrize("call", ["save", "wait", "restore", "restore_latest", "close", "exit"])
def test_a_failure_is_raised_at_the_next_call(tmp_path, call) -> None:
    checkpoint = replicax.Checkpoint(v=replicax.Variable(np.ones(100_000, np.float32)))
    manager = replicax.CheckpointManager(checkpoint, tmp_path, every_steps=2)
    manager.save(2)
    manager.wait()
    with files_up_to(50_000):
        assert manager.save(4)
        assert checkpoint._background._last.exception(60) is not None
    calls = {
        "save": lambda: manager.save(5),  # at which it would not save
        "restore": lambda: manager.restore(2),
        "exit": lambda: manager.__exit__(None, None, None),
    }
    with pytest.raises(replicax.errors.CheckpointError, match="step-00000004 could not be written: OSError"):
        calls.get(call, getattr(manager, call, None))()
    assert manager.steps == (2,)
    assert manager.save(4, force=True)  # the same step again
    manager.close()
    assert manager.steps == (2, 4)


def test_a_failure_does_not_hide_the_error_of_the_run(tmp_path, caplog) -> None:
    checkpoint = replicax.Checkpoint(v=replicax.Variable(np.ones(100_000, np.float32)))

    def fails() -> None:
        with replicax.CheckpointManager(checkpoint, tmp_path) as manager:
            manager.save(1)
            raise ZeroDivisionError

    with files_up_to(50_000), caplog.at_level(logging.ERROR, "replicax"), pytest.raises(ZeroDivisionError):
        fails()
    assert "step-00000001 could not be written" in caplog.text


@pytest.mark.parametrize("is_raised", [True, False])
def test_a_failure_is_logged_at_the_end_of_the_program_if_it_was_not_raised(tmp_path, caplog, is_raised) -> None:
    checkpoint = replicax.Checkpoint(v=replicax.Variable(np.ones(100_000, np.float32)))
    with files_up_to(50_000):
        checkpoint.save(tmp_path / "a", wait=False)
        if is_raised:
            with pytest.raises(replicax.errors.CheckpointError):
                checkpoint.wait()
        with caplog.at_level(logging.ERROR, "replicax"):
            background_save._at_exit()
    assert (checkpoint._background._last in background_save._unfinished) is not is_raised
    assert (f"the checkpoint {tmp_path}/a could not be written" in caplog.text) is not is_raised
    with contextlib.suppress(replicax.errors.CheckpointError):
        checkpoint.wait()


@pytest.mark.parametrize("needs_others", [True, False])
def test_the_end_of_the_program_waits_for_all_but_workers_that_are_gone(monkeypatch, caplog, needs_others) -> None:
    over = threading.Event()

    def write(is_cancelled) -> None:  # waits for the others
        while not (is_cancelled() or over.is_set()):
            time.sleep(0.005)
        raise replicax.errors.CheckpointError("no other worker has come")

    monkeypatch.setattr(background_save, "SHUTDOWN_PATIENCE", 0.05)
    background = background_save.BackgroundSave()
    background.begin(lambda: write, needs_others)
    end = threading.Thread(target=background_save._at_exit)
    end.start()
    end.join(5.0 if needs_others else 0.3)
    is_over = not end.is_alive()
    over.set()
    end.join()
    assert is_over is needs_others
    assert "no other worker has come" in caplog.text
    with pytest.raises(replicax.errors.CheckpointError):
        background.wait()


@pytest.mark.parametrize("call", ["fsync", "rename", "last fsync", "scandir 1", "scandir 3"])
def test_errors_of_the_file_system(tmp_path, monkeypatch, call) -> None:
    """Of the calls that make a checkpoint last; a disk may say only there that it is full or broken."""
    checkpoint = replicax.Checkpoint(v=replicax.Variable(1.0))
    name = next(name for name in ("fsync", "rename", "scandir") if name in call)
    function, calls = getattr(os, name), []

    def fails(*args):
        calls.append(args)
        if name == "scandir" and len(calls) != int(call.split()[1]):
            return function(*args)
        if call != "last fsync" or (tmp_path / "a").exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fails)
        with pytest.raises(
            replicax.errors.CheckpointError, match="could not be written: OSError: .*Input/output error"
        ):
            checkpoint.save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    checkpoint.save(tmp_path / "a")


def test_a_save_whose_thread_could_not_start_is_followed_by_others(tmp_path, monkeypatch) -> None:
    def refuses(thread):
        raise RuntimeError("can't start new thread")

    checkpoint = replicax.Checkpoint(v=replicax.Variable(1.0))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuses)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            checkpoint.save(tmp_path / "a")
    checkpoint.save(tmp_path / "a", wait=False)
    assert concurrent.futures.wait([checkpoint._background._last], 60).done


def test_what_another_run_has_put_into_the_place_meanwhile_stays(tmp_path, monkeypatch) -> None:
    write = saving.write_pieces

    def write_while_another_saves(folder, pieces) -> None:
        write(folder, pieces)
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "theirs").touch()

    monkeypatch.setattr(saving, "write_pieces", write_while_another_saves)
    with pytest.raises(replicax.errors.CheckpointError, match="it exists already .*: another run may save in this fol"):
        replicax.Checkpoint(v=replicax.Variable(1.0)).save(tmp_path / "a")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "theirs"]


@pytest.mark.parametrize("function", ["_write_own", "_finish"])
def test_any_other_error_leaves_nothing_behind_too(tmp_path, monkeypatch, function) -> None:
    monkeypatch.setattr(saving, function, lambda *_: {}["gone"])
    with pytest.raises(replicax.errors.CheckpointError, match="could not be written: KeyError: 'gone'"):
        replicax.Checkpoint(x=np.zeros(3)).save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_is_written_last_and_all_is_flushed_before_the_name(tmp_path, monkeypatch) -> None:
    calls, numbers = [], []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(number):
        numbers.append(number)
        calls.append(os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    def noted_rename(source, target):
        calls.append((source, target))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    replicax.Checkpoint(v=replicax.Variable(1.0)).save(tmp_path / "a")
    [(source, target)] = [call for call in calls if isinstance(call, tuple)]
    assert target == str(tmp_path / "a")
    before, after = calls[: calls.index((source, target))], calls[calls.index((source, target)) + 1 :]
    files = [str(path.relative_to(tmp_path / "a")) for path in (tmp_path / "a").rglob("*")]
    assert set(before) == {source, *(f"{source}/{name}" for name in files)}
    assert before[-2:] == [f"{source}/manifest.json", source]
    assert after == [str(tmp_path)]
    assert not [n for n in numbers if os.path.exists(f"/proc/self/fd/{n}")]


def test_something_in_the_place(tmp_path) -> None:
    checkpoint = replicax.Checkpoint(step=1)
    checkpoint.save(tmp_path / "above" / "a")
    with pytest.raises(FileExistsError, match="there is something in .*above/a already: save to another path"):
        checkpoint.save(tmp_path / "above" / "a")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="there is something in"):
        checkpoint.save(tmp_path / "link")
    checkpoint.save(tmp_path / "b", wait=False)
    with pytest.raises(FileExistsError, match="there is something in"):  # or will be
        checkpoint.save(tmp_path / "b", wait=False)


def test_relative_paths(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = replicax.Checkpoint(step=1)
    checkpoint.save("a")
    checkpoint.save("b/c", wait=False)
    os.chdir("/")  # to restore waits for the save
    checkpoint.restore(tmp_path / "b" / "c")
    checkpoint.restore(tmp_path / "a")
