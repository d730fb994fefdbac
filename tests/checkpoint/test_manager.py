"""When a manager saves, what it restores, and what it deletes."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import types

import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.checkpoint import retention, saving
from replicax.workers import heartbeat
from replicax.workers.heartbeat_page import Phase


@pytest.fixture
def v() -> replicax.Variable:
    return replicax.Variable(np.zeros(3, np.float32))


@pytest.fixture
def checkpoint(v) -> replicax.Checkpoint:
    return replicax.Checkpoint(v=v)


def saved(manager: replicax.CheckpointManager, steps, **options) -> list[int]:
    """The steps of these at which it saves."""
    found = [step for step in steps if manager.save(step, **options)]
    manager.wait()
    return found


def test_each_call_saves_unless_told_otherwise(checkpoint, tmp_path) -> None:
    manager = replicax.CheckpointManager(checkpoint, tmp_path)
    assert saved(manager, [0, 1, 5]) == [0, 1, 5]
    assert manager.steps == (0, 1, 5)
    assert (manager.latest_step, manager.best_step, manager.directory) == (5, None, str(tmp_path))


def test_every_so_many_steps(checkpoint, tmp_path) -> None:
    manager = replicax.CheckpointManager(checkpoint, tmp_path / "one", every_steps=10)
    assert saved(manager, range(1, 35)) == [10, 20, 30]
    assert manager.save(34, force=True)
    manager.wait()
    manager = replicax.CheckpointManager(checkpoint, tmp_path / "one", every_steps=10)
    assert manager.restore_latest() == 34
    assert saved(manager, range(35, 45)) == [40]  # as if it had not been broken off
    by_seven = replicax.CheckpointManager(checkpoint, tmp_path / "seven", every_steps=10)
    assert saved(by_seven, range(7, 50, 7)) == [14, 21, 35, 42]


def test_every_so_many_seconds(checkpoint, tmp_path, monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    manager = replicax.CheckpointManager(checkpoint, tmp_path, every_seconds=60, every_steps=1000)
    found = []
    for step in range(1, 41):
        now[0] += 5.0
        found += [step] if manager.save(step) else []
    assert found == [12, 24, 36]
    manager.close()


def test_the_newest_are_kept(checkpoint, tmp_path) -> None:
    manager = replicax.CheckpointManager(checkpoint, tmp_path, max_to_keep=2)
    saved(manager, range(1, 6))
    assert manager.steps == (4, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manager.json", "step-00000004", "step-00000005"]
    again = replicax.CheckpointManager(checkpoint, tmp_path, max_to_keep=1)  # in the next run it is the same manager
    assert again.restore_latest() == 5
    saved(again, [6])
    assert again.steps == (6,)
    everything = replicax.CheckpointManager(checkpoint, tmp_path, max_to_keep=None)
    saved(everything, range(7, 17))
    assert len(everything.steps) == 11


@pytest.mark.parametrize("direction", ["max", "min"])
def test_of_equally_good_ones_the_latest_is_best(checkpoint, tmp_path, direction) -> None:
    manager = replicax.CheckpointManager(checkpoint, tmp_path, max_to_keep=1, best=("score", direction))
    worse = {"max": 0.25, "min": 0.75}[direction]
    for step, score in enumerate([0.5, 0.5, worse], 1):
        manager.save(step, {"score": score})
    manager.wait()
    assert (manager.best_step, manager.steps) == (2, (2, 3))


@pytest.mark.parametrize(("direction", "best", "kept"), [("max", 2, (2, 5, 6)), ("min", 3, (3, 5, 6))])
def test_the_best_is_kept(checkpoint, tmp_path, direction, best, kept) -> None:
    manager = replicax.CheckpointManager(checkpoint, tmp_path, max_to_keep=2, best=("score", direction))
    for step, score in enumerate([0.5, 0.9, 0.1, 0.3, float("nan"), 0.4], 1):
        checkpoint.v.assign(np.full(3, step, np.float32))
        manager.save(step, {"score": jnp.float32(score), "other": 1})
    manager.wait()
    assert manager.steps == kept
    assert manager.best_step == best
    manager.restore(best)
    assert float(checkpoint.v.value[0]) == best
    again = replicax.CheckpointManager(checkpoint, tmp_path, best=("score", direction))
    assert again.best_step == best
    with pytest.raises(ValueError, match=r"needs the metric 'score', got \['loss'\]"):
        again.save(9, {"loss": 1.0})
    with pytest.raises(ValueError, match="the metric 'score' is no number: 'high'"):
        again.save(9, {"score": "high"})
    with pytest.raises(
        replicax.errors.CheckpointError, match="of step 1 in .* can't be restored: .*there is no such folder"
    ):
        again.restore(1)


def test_metrics_that_are_known_later_come_to_those_of_the_save(checkpoint, tmp_path) -> None:
    """As ``replicax.train`` adds those of an evaluation."""
    manager = replicax.CheckpointManager(checkpoint, tmp_path)
    saved(manager, [1, 2], metrics={"loss": 0.5})
    for step in (1, 2):
        manager._add_metrics(step, {"score": float(step)})
    for one in (manager, replicax.CheckpointManager(checkpoint, tmp_path, best=("score", "max"))):
        assert [one._metrics_of(step) for step in (1, 2)] == [{"loss": 0.5, "score": float(step)} for step in (1, 2)]
    assert (one.best, one.best_step) == (("score", "max"), 2)


def test_the_launcher_is_told_what_takes_long(checkpoint, tmp_path, monkeypatch) -> None:
    phases: list[Phase] = []
    beat = types.SimpleNamespace(is_of_this_thread=lambda: True, switch=phases.append)
    monkeypatch.setattr(heartbeat, "current", beat)
    manager = replicax.CheckpointManager(checkpoint, tmp_path)
    for call, phase in (
        *((lambda: checkpoint.save(tmp_path / "a"), Phase.SAVING), (checkpoint.wait, Phase.SAVING)),
        *((lambda: manager.save(1), Phase.SAVING), (manager.wait, Phase.SAVING)),
        *((lambda: checkpoint.restore(tmp_path / "a"), Phase.RESTORING), (manager.restore_latest, Phase.RESTORING)),
        (lambda: manager.restore(1), Phase.RESTORING),
    ):
        phases.clear()
        call()
        assert phases[0] is phase


# --- what is not deleted --------------------------------------------------------------------------------


def test_nothing_of_others_is_deleted(checkpoint, tmp_path, caplog) -> None:
    other = replicax.CheckpointManager(checkpoint, tmp_path / "other")
    saved(other, [1])
    folder = tmp_path / "run"
    manager = replicax.CheckpointManager(checkpoint, folder, max_to_keep=1)
    saved(manager, [2])
    # A checkpoint of another run, one without a manager, a renamed one, one with notes, and things that look alike.
    shutil.copytree(tmp_path / "other" / "step-00000001", folder / "step-00000001")
    checkpoint.save(folder / "step-00000000")
    shutil.copytree(folder / "step-00000002", folder / "best model")
    shutil.copytree(folder / "step-00000002", folder / "step-00000006")
    saved(manager, [3])
    (folder / "step-00000003" / "notes.txt").write_text("keep this")
    (folder / "step-00000009.unfinished-12345678").mkdir()
    (folder / "step-9").mkdir()
    with caplog.at_level(logging.WARNING, "replicax"):
        saved(manager, [4, 5])
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "best model",
        "manager.json",
        "step-00000000",
        "step-00000001",
        "step-00000003",
        "step-00000005",
        "step-00000006",
        "step-00000009.unfinished-12345678",
        "step-9",
    }
    told = "step-00000003 is kept, as it has notes.txt, which is not the manager's"
    assert caplog.text.count(told) == 1  # not at each save


@pytest.mark.parametrize("name", [".notes", "arrays-0/.notes", "notes/why.txt"])
def test_a_checkpoint_with_a_file_of_the_user_is_not_deleted(checkpoint, tmp_path, name) -> None:
    manager = replicax.CheckpointManager(checkpoint, tmp_path, max_to_keep=1)
    saved(manager, [1])
    file = tmp_path / "step-00000001" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("keep this")
    saved(manager, [2, 3])
    assert file.read_text() == "keep this"
    assert manager.steps == (1, 3)


def test_a_step_that_is_damaged_again_and_again(checkpoint, tmp_path) -> None:
    for _ in range(3):
        manager = replicax.CheckpointManager(checkpoint, tmp_path)
        assert manager.restore_latest() == (1 if manager.steps else None)
        saved(manager, range(len(manager.steps) + 1, 3))
        (tmp_path / "step-00000002" / "index.json").unlink()
    names = [path.name for path in tmp_path.iterdir() if path.name.startswith("step-00000002")]
    assert sorted(names) == ["step-00000002", "step-00000002.damaged-1", "step-00000002.damaged-2"]


def test_what_a_broken_save_has_left_is_removed(checkpoint, tmp_path) -> None:
    manager = replicax.CheckpointManager(checkpoint, tmp_path)
    own = json.loads((tmp_path / "manager.json").read_text())["id"]
    left = tmp_path / f"step-00000001.unfinished-{own[:8]}-12345678"
    (left / "arrays-0").mkdir(parents=True)
    (left / "arrays-0" / "part").write_bytes(b"x")
    assert manager.restore_latest() is None  # nothing has ever been saved
    assert left.exists()
    saved(manager, [2])
    assert not left.exists()


def test_the_newest_whole_one_is_never_deleted(checkpoint, tmp_path) -> None:
    """Not even if newer ones are there, but damaged."""
    manager = replicax.CheckpointManager(checkpoint, tmp_path, max_to_keep=1)
    saved(manager, [1])
    (tmp_path / "step-00000007").mkdir()
    (tmp_path / "step-00000008").mkdir()
    manager = replicax.CheckpointManager(checkpoint, tmp_path, max_to_keep=1)
    assert manager.latest_step == 1
    assert manager.restore_latest() == 1
    saved(manager, [2])
    assert manager.steps == (2,)


def test_a_checkpoint_that_the_user_removes_is_forgotten(checkpoint, tmp_path) -> None:
    """The user goes back to an earlier step, and trains on from there."""
    manager = replicax.CheckpointManager(checkpoint, tmp_path)
    saved(manager, [1, 2, 3])
    shutil.rmtree(tmp_path / "step-00000003")
    assert (manager.restore_latest(), manager.latest_step) == (2, 2)
    assert saved(manager, [3]) == [3]
    assert manager.steps == (1, 2, 3)


def test_a_folder_that_is_deleted_during_a_run_gets_its_id_again(checkpoint, tmp_path) -> None:
    options = {"max_to_keep": 1, "every_steps": 2, "best": ("loss", "min")}
    with replicax.CheckpointManager(checkpoint, tmp_path / "run", **options) as manager:
        manager.save(3, {"loss": 1.0})
        manager.wait()
        shutil.rmtree(tmp_path / "run")
        assert (manager.steps, manager.latest_step, manager.best_step) == ((), None, None)
        assert manager.restore_latest() is None
        manager.save(2, {"loss": 1.0})
    with replicax.CheckpointManager(checkpoint, tmp_path / "run", max_to_keep=1) as manager:
        assert manager.restore_latest() == 2
        manager.save(3)
        manager.wait()
        assert manager.steps == (3,)  # the first run's is this folder's, too


def test_two_managers_of_one_folder(checkpoint, tmp_path) -> None:
    first, second = (replicax.CheckpointManager(checkpoint, tmp_path) for _ in range(2))
    saved(first, [3])
    with pytest.raises(FileExistsError, match="step-00000003 now, which this manager has not written"):
        second.save(3)
    assert first.steps == (3,)
    assert (second.restore_latest(), second.latest_step, second.steps) == (3, 3, (3,))


def test_an_unfinished_save_of_another_manager_is_left_alone(checkpoint, tmp_path, monkeypatch) -> None:
    first, second = (replicax.CheckpointManager(replicax.Checkpoint(v=checkpoint.v), tmp_path) for _ in range(2))
    write = saving.write_pieces

    def write_while_another_saves(folder, pieces) -> None:
        write(folder, pieces)
        monkeypatch.setattr(saving, "write_pieces", write)
        saved(second, [1])

    monkeypatch.setattr(saving, "write_pieces", write_while_another_saves)
    saved(first, [2])
    assert first.restore_latest() == 2  # with all its pieces
    assert {path.name for path in tmp_path.iterdir()} == {"manager.json", "step-00000001", "step-00000002"}


def test_a_lock_is_not_kept_by_a_process_that_was_forked_meanwhile(tmp_path) -> None:
    (tmp_path / retention.OWNER).touch()
    with retention.locked(str(tmp_path)):
        numbers = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
        [number] = [n for n in numbers if os.readlink(f"/proc/self/fd/{n}") == str(tmp_path / retention.OWNER)]
        copy = os.dup(number)  # as the process would have one
    with retention.locked(str(tmp_path), alone=True) as is_free:
        assert is_free
    os.close(copy)


def test_old_checkpoints_that_another_manager_deletes_at_the_same_time(checkpoint, tmp_path, monkeypatch) -> None:
    delete, broken = shutil.rmtree, []

    def deleted_by_two(path) -> None:
        delete(path)
        broken.append(path)
        delete(path)

    manager = replicax.CheckpointManager(checkpoint, tmp_path, max_to_keep=1)
    saved(manager, [1, 2])
    shutil.copytree(tmp_path / "step-00000002", f"{tmp_path}/step-00000001.unfinished-{manager._folder.id[:8]}-1")
    monkeypatch.setattr(shutil, "rmtree", deleted_by_two)
    saved(manager, [3])
    assert len(broken) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manager.json", "step-00000003"]

    def refused(path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(shutil, "rmtree", refused)
    with pytest.raises(replicax.errors.CheckpointError, match="old checkpoints in .* can't be deleted: .*denied"):
        saved(manager, [4])
    assert manager.steps == (4,)


def test_two_managers_that_make_a_folder_at_once_have_one_id(tmp_path, monkeypatch) -> None:
    write, others = retention.manifest.write_flushed, []

    def written(path: str, text: str) -> None:
        write(path, text)
        if not others:
            others.append(retention.Folder(str(tmp_path)))
            others[0].own()

    monkeypatch.setattr(retention.manifest, "write_flushed", written)
    folder = retention.Folder(str(tmp_path))
    folder.own()
    assert folder.id == others[0].id
    assert [path.name for path in tmp_path.iterdir()] == ["manager.json"]


def test_a_folder_gets_an_id_on_a_file_system_without_links(tmp_path, monkeypatch) -> None:
    def refused(*paths: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    folder = retention.Folder(str(tmp_path))
    folder.own()
    assert folder.id == json.loads((tmp_path / "manager.json").read_text())["id"]
    assert [path.name for path in tmp_path.iterdir()] == ["manager.json"]


# --- misuses --------------------------------------------------------------------------------------------


def test_steps_that_are_there_or_later(checkpoint, tmp_path) -> None:
    saved(replicax.CheckpointManager(checkpoint, tmp_path), [5])
    manager = replicax.CheckpointManager(checkpoint, tmp_path)
    with pytest.raises(ValueError, match=r"save\(5\): there is a checkpoint of this step in .*restore_latest\(\)"):
        manager.save(5)
    with pytest.raises(ValueError, match=r"save\(4\): the latest is of step 5 in .*a new run needs a folder"):
        manager.save(4)
    for step in (-1, 1.5, "6", True, None):
        with pytest.raises(ValueError, match="step must be an int of at least 0"):
            manager.save(step)
        with pytest.raises(ValueError, match="step must be an int of at least 0"):
            manager.restore(step)
    with pytest.raises(TypeError, match="checkpoint must be a replicax.Checkpoint, got <Variable"):
        replicax.CheckpointManager(checkpoint.v, tmp_path)
    with pytest.raises(TypeError, match="metrics must be a dict of numbers by name, got 0.5"):
        manager.save(6, 0.5)
    assert manager.save(np.int64(6))
    manager.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_to_keep": 0}, "max_to_keep must be an int of at least 1, or None, got 0"),
        ({"every_steps": 2.5}, "every_steps must be an int"),
        ({"every_seconds": -1}, "every_seconds must be a positive number, got -1"),
        ({"best": "accuracy"}, r"best names a metric and 'min' or 'max', as in best=\('accuracy', 'max'\)"),
        ({"best": ("accuracy", "highest")}, "best names a metric"),
    ],
)
def test_wrong_options(checkpoint, tmp_path, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        replicax.CheckpointManager(checkpoint, tmp_path, **options)


def test_folders_that_cannot_be(checkpoint, tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError, match=rf"there can be no folder {directory}: {tmp_path}/file is a file"):
            replicax.CheckpointManager(checkpoint, directory)
        with pytest.raises(NotADirectoryError, match="is a file"):
            checkpoint.save(directory / "a")
    (tmp_path / "link").symlink_to("not-mounted")
    with pytest.raises(NotADirectoryError, match=rf": {tmp_path}/link is a link to nothing"):
        replicax.CheckpointManager(checkpoint, tmp_path / "link")
    with pytest.raises(OSError, match=r"the folder /proc/nowhere/run can't be made"):
        replicax.CheckpointManager(checkpoint, "/proc/nowhere/run")
    for use in (checkpoint.save, checkpoint.restore, lambda path: replicax.CheckpointManager(checkpoint, path)):
        with pytest.raises(ValueError, match=r"must be a path in UTF-8, got '.*\\udcff'"):
            use(os.fsencode(tmp_path) + b"/\xff")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "manager.json").write_text("{}")
    with pytest.raises(OSError, match=r"manager.json can't be read, by which .*; remove it"):
        replicax.CheckpointManager(checkpoint, tmp_path / "odd")
    saved(replicax.CheckpointManager(checkpoint, tmp_path / "run"), [1])
    (tmp_path / "run" / "metrics.json").write_text("{")
    assert replicax.CheckpointManager(checkpoint, tmp_path / "run").steps == (1,)
    assert "metrics.json, which has metrics of checkpoints, can't be read: " in caplog.text


def test_a_relative_folder_in_one_that_is_deleted(checkpoint, tmp_path, monkeypatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for use in (checkpoint.save, checkpoint.restore, lambda path: replicax.CheckpointManager(checkpoint, path)):
        with pytest.raises(FileNotFoundError, match="is relative, 'run', and the current folder has been deleted"):
            use("run")
