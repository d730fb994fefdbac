"""Checkpoints of several real worker processes, with a disk that they share, and with one for each."""

from __future__ import annotations

import json
import pathlib
import shutil

import numpy as np
import pytest

import replicax
from tests import processes
from tests.checkpoint import workers_runs
from tests.checkpoint.runs import Run
from tests.conftest import strategy_of


def saved_by_two_workers(folder: pathlib.Path, shared: bool):
    """What two workers with two replicas each have saved, and where."""
    if not shared:
        for worker in (0, 1):
            (folder / f"disk-{worker}").mkdir()
    results = processes.run(workers_runs.everything, str(folder), shared, workers=2, devices=2)
    return results, [folder] * 2 if shared else [folder / "disk-0", folder / "disk-1"]


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """A checkpoint of an earlier run."""
    path = tmp_path_factory.mktemp("older") / "a"
    Run.of(strategy_of(2), seed=5).checkpoint.save(path)
    return path


@pytest.fixture(scope="module")
def on_disks(tmp_path_factory, older):
    """The disks of two workers, both with the checkpoint of step 2, and what the workers say."""
    return saved_by_two_workers(tmp_path_factory.mktemp("disks"), False)


@pytest.fixture(scope="module", params=[True, False], ids=["shared", "own-disks"])
def made(request, tmp_path_factory):
    if request.param:
        return saved_by_two_workers(tmp_path_factory.mktemp("shared"), True)
    return request.getfixturevalue("on_disks")


def test_workers_save_and_restore(made) -> None:
    results, folders = made
    for result in results:
        assert result["saved"] == [False, True]
        assert result["restored"] == 2
        assert result["same"]
        assert result["goes_on"]
        assert result["names"] == ["manager.json", "step-00000002"]
        assert result["values"] == results[0]["values"]
    manifests = [json.loads((folder / "step-00000002" / "manifest.json").read_text()) for folder in folders]
    assert manifests[0]["id"] == manifests[1]["id"]


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_one_process_goes_on(made, replicas) -> None:
    results, folders = made
    for folder in folders:
        run = Run.of(strategy_of(replicas), batch=3, seed=1)
        run.checkpoint.restore(folder / "step-00000002")
        assert run.values() == results[0]["values"]
        assert run.coming() == results[0]["coming"][:3]


def test_workers_go_on_from_one_process_and_others(tmp_path, on_disks) -> None:
    results, folders = on_disks
    run = Run.of(replicax.ShardedStrategy(["cpu:0", "cpu:1", "cpu:2"]))
    run.go(1)
    run.checkpoint.save(tmp_path / "a")
    values, coming = run.values(), run.coming()
    for found, examples in processes.run(workers_runs.restored, str(tmp_path / "a"), 4, workers=2, devices=2):
        assert found == values
        assert examples == coming[:4]
    path = str(folders[0] / "step-00000002")
    for found, examples in processes.run(workers_runs.restored, path, 6, workers=3):
        assert found == results[0]["values"]
        assert examples == results[0]["coming"][:6]


def test_each_byte_is_written_by_one_worker(tmp_path) -> None:
    results = processes.run(workers_runs.large, str(tmp_path), True, workers=2, devices=2)
    for sizes, model, _ in results:
        assert set(sizes) == {"arrays-0", "arrays-1"}
        assert sum(sizes.values()) < 11 * 40_000 * 1.05
        assert abs(sizes["arrays-0"] - sizes["arrays-1"]) < 1.1 * 40_000
        assert model == list(range(10))
    assert [copies for _, _, copies in results] == [[[1.0] * 4, [2.0] * 4], [[3.0] * 4, [4.0] * 4]]


def test_each_disk_has_every_byte_once(tmp_path) -> None:
    for worker, (sizes, model, _) in enumerate(processes.run(workers_runs.large, str(tmp_path), False, devices=2)):
        assert set(sizes) == {f"arrays-{worker}"}
        assert 11 * 40_000 < sizes[f"arrays-{worker}"] < 11 * 40_000 * 1.05
        assert model == list(range(10))


@pytest.mark.parametrize("shared", [True, False])
def test_arrays_of_which_each_worker_has_a_part(tmp_path, shared) -> None:
    results = processes.run(workers_runs.global_arrays, str(tmp_path), shared, workers=2, devices=2)
    assert results == [
        [[[0.0, 1.0], [2.0, 3.0]], list(range(8)), 3],
        [[[4.0, 5.0], [6.0, 7.0]], list(range(8)), 3],
    ]
    if shared:
        checkpoint = replicax.Checkpoint(array=np.zeros(8, np.float32), here=np.zeros(8, np.float32), step=0)
        checkpoint.restore(tmp_path / "global", partial=True)
        assert checkpoint.array.tolist() == list(range(8))
    else:  # one disk has a part of it only
        with pytest.raises(replicax.errors.CheckpointError, match="no worker has all of array"):
            replicax.Checkpoint(array=np.zeros(8, np.float32), here=np.zeros(8, np.float32), step=0).restore(
                tmp_path / "disk-1" / "global"
            )


def test_every_so_many_seconds_of_the_chief(tmp_path) -> None:
    first, second = processes.run(workers_runs.seconds, str(tmp_path), workers=2, devices=2)
    assert first == second
    assert 2 <= len(first) <= 3
    assert all(30 <= after - before <= 45 for before, after in zip([0, *first], first, strict=False))


def test_misuses_are_told_on_all_workers(tmp_path) -> None:
    first, second = processes.run(workers_runs.misuses, str(tmp_path), workers=2, devices=2)
    blocked = tmp_path / "blocked"
    # All raise an error of one class, so that all take the same branch if the program catches it.
    assert first[0] == second[0] == f"NotADirectoryError: there can be no folder {blocked}: {blocked} is a file"
    assert first[1] == second[1] == f"FileNotFoundError: there is no checkpoint {tmp_path}/nowhere"
    assert first[2] == second[2] == first[0]
    assert first[3] == second[3]
    assert first[3].startswith(f"FileExistsError: there is something in {tmp_path}/b already")
    assert first[4] == (
        f"CheckpointError: the checkpoint {tmp_path}/c could not be written: on worker 1: OSError: [Errno 28] No space "
        "left on device"
    )
    assert "OSError: [Errno 28] No space left on device" in second[4]
    assert first[5].endswith(
        "worker 1 saves other objects than worker 0, or they lie elsewhere there; all workers must save the same"
    )
    assert second[5] == first[5]
    assert not (tmp_path / "c").exists()
    assert [path for path in tmp_path.iterdir() if "unfinished" in path.name] == []


# --- workers with a disk each ---------------------------------------------------------------------------


@pytest.fixture
def disks(on_disks, tmp_path):
    """A copy of the two workers' disks, and the values that they saved."""
    results, folders = on_disks
    shutil.copytree(folders[0].parent, tmp_path, dirs_exist_ok=True)
    return [tmp_path / "disk-0", tmp_path / "disk-1"], results[0]["values"]


@pytest.mark.parametrize(
    "case",
    ["one damaged", "stale"]
    + [
        pytest.param(case, marks=pytest.mark.soak)
        for case in ("a third worker", "other order", "one lost", "one behind")
    ],
)
def test_one_surviving_copy_suffices(disks, tmp_path, older, case) -> None:
    folders, values = disks
    workers = 2
    if case == "other order":
        folders = folders[::-1]
    elif case == "one lost":
        shutil.rmtree(folders[0])
    elif case == "one damaged":
        (folders[1] / "step-00000002" / "index.json").write_text("")
    elif case == "a third worker":
        workers, folders = 3, [tmp_path / "new", *folders]
    elif case == "one behind":  # it was killed before it had finished the newest
        shutil.rmtree(folders[1])
        shutil.copytree(folders[0], folders[1])
        shutil.move(folders[1] / "step-00000002", folders[1] / "step-00000002.unfinished-x")
    else:  # the same step of another run, as on a disk that has come back from somewhere else
        shutil.rmtree(folders[0])
        shutil.copytree(older, folders[0] / "step-00000002")
    devices = 2 if workers == 2 else 1
    results = processes.run(workers_runs.latest, [str(f) for f in folders], workers=workers, devices=devices)
    for found, theirs, messages, again in results:
        assert found == 2
        assert theirs == values
        assert again
        assert not [m for m in messages if "passed over" in m]
    for folder in folders:
        assert (pathlib.Path(folder) / "step-00000012").exists()


def test_nobody_has_a_whole_one(disks) -> None:
    folders, _ = disks
    for folder in folders:
        (folder / "step-00000002" / "index.json").write_text("")
    for found, *_ in processes.run(workers_runs.latest, [str(f) for f in folders], workers=2, devices=2):
        assert "none of the checkpoints in" in found
        assert "step-00000002: on worker 0: index.json has 0 bytes" in found
        assert "; on worker 1: index.json has 0 bytes" in found
