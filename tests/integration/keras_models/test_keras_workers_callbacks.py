"""Callbacks of Keras on several workers, each with a disk of its own: the chief's is the one with files."""

from __future__ import annotations

import pathlib
import shutil

import jax
import numpy as np
import pytest

from tests import processes
from tests.integration.keras_models import workers_keras_callbacks
from tests.integration.keras_models.workers_keras_callbacks import BACKUP


@pytest.fixture
def disks(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with one for each worker, and one for a program that is alone."""
    for name in ("alone", "0", "1"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.mark.parametrize("kind", ["mirrored", "sharded"])
def test_a_backup_that_the_chief_alone_has(kind: str, disks: pathlib.Path) -> None:
    expected = workers_keras_callbacks.resumed(disks / "alone", seed=7)
    assert [len(expected[f"loss {run}"]) for run in range(3)] == [2, 2, 1]
    found = processes.run(workers_keras_callbacks.resume, kind, disks, devices=[2, 1], timeout=180)
    assert not list((disks / "1").iterdir())
    for values in (*found, expected):
        del values["begin 0"]  # of a new model, before its first step: each worker's own
    jax.tree.map(np.testing.assert_array_equal, found[0], found[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found[0], expected)


def test_a_backup_that_another_worker_alone_has(disks: pathlib.Path) -> None:
    workers_keras_callbacks.resumed(disks / "alone", seed=7)
    shutil.copytree(disks / "alone" / BACKUP, disks / "1" / BACKUP)
    for message, weights in processes.run(workers_keras_callbacks.fails_to_resume, disks, devices=[2, 1], timeout=120):
        assert message.startswith("ValueError: BackupAndRestore: the chief, worker 0, reads the backup"), message
        assert f"has none in {str(disks / '0' / BACKUP)!r}; but worker 1 has one in" in message
        assert all(np.isfinite(w).all() for w in weights)


def test_a_backup_that_is_damaged(disks: pathlib.Path) -> None:
    (disks / "0" / BACKUP).mkdir()
    (disks / "0" / BACKUP / "latest.weights.h5").write_bytes(b"no HDF5")
    messages = [
        message
        for message, _ in processes.run(workers_keras_callbacks.fails_to_resume, disks, devices=[2, 1], timeout=120)
    ]
    assert all(message.startswith("OSError: ") for message in messages), messages
    assert messages[0] == messages[1]


@pytest.mark.parametrize("kind", ["mirrored", "sharded"])
def test_the_chief_writes(kind: str, disks: pathlib.Path) -> None:
    losses = processes.run(workers_keras_callbacks.write, kind, disks, devices=[2, 1], timeout=180)
    assert losses[0] == losses[1]
    assert sorted(p.name for p in (disks / "0").iterdir()) == ["board", "log.csv", "made"]
    assert sorted(p.name for p in (disks / "0" / "board").iterdir()) == ["train", "validation"]
    assert (disks / "0" / "made" / "model.keras").exists()
    assert not list((disks / "1").iterdir())
