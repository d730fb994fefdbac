"""Runs that are killed, or interrupted, at any point of a save or a restore: the next run finds a whole checkpoint."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

import replicax
from tests import forked, processes
from tests.checkpoint.broken_runs import POINTS


@contextlib.contextmanager
def stopped(point: str, folder: pathlib.Path) -> Iterator[forked.Process]:
    """A process that has come to a point."""
    log = folder.parent / "log"
    process = forked.start("tests.checkpoint.broken_runs", [point, str(folder)], log, dict(os.environ), folder.parent)
    try:
        deadline = time.monotonic() + 60
        while "stopped" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        assert "not stopped" not in log.read_text()
        yield process
    finally:
        process.kill()
        process.wait()


def fresh() -> replicax.Checkpoint:
    return replicax.Checkpoint(v=replicax.Variable(np.zeros(1000, np.float32)))


@pytest.mark.parametrize(
    "point", [pytest.param(p, marks=pytest.mark.soak) if p in ("begun", "restore") else p for p in POINTS]
)
def test_killed(tmp_path, point) -> None:
    folder = tmp_path / "run"
    if point == "restore":
        checkpoint = fresh()
        checkpoint.v.assign(np.full(1000, 2, np.float32))
        with replicax.CheckpointManager(checkpoint, folder) as manager:
            manager.save(2)
    with stopped(point, folder) as process:
        process.kill()
        assert process.wait() == -signal.SIGKILL
    expected = 3 if point in ("renamed", "deleting") else 2
    checkpoint = fresh()
    manager = replicax.CheckpointManager(checkpoint, folder, max_to_keep=2)
    assert manager.restore_latest() == expected
    assert checkpoint.v.numpy().tolist() == [expected] * 1000
    manager.save(expected + 1)
    manager.close()
    whole = [f"step-{step:08d}" for step in (expected, expected + 1)]
    assert sorted(path.name for path in folder.iterdir()) == ["manager.json", *whole[-len(manager.steps) :]]


def test_interrupted_while_it_waits_for_a_save(tmp_path) -> None:
    folder = tmp_path / "run"
    with stopped("interrupted", folder) as process:
        os.kill(process._pid, signal.SIGINT)
        assert process.wait() != 0
    checkpoint = fresh()
    checkpoint.restore(folder / "step-00000001")
    assert checkpoint.v.numpy().tolist() == [7] * 1000


@pytest.mark.parametrize(
    ("point", "told", "whole"),
    [("writing", "could not be written", 1), ("written", "may be whole or not, as a worker did not confirm it, .*", 2)],
)
def test_a_worker_that_is_killed_while_all_save(tmp_path, point, told, whole) -> None:
    folder = tmp_path / "run"
    address = f"127.0.0.1:{processes.free_port()}"
    programs = [
        [*processes.MODULE, "tests.checkpoint.killed_worker", address, str(i), str(folder), point] for i in (0, 1)
    ]
    running, logs = processes._start(programs, tmp_path)
    try:
        deadline = time.monotonic() + 60
        while running[0].poll() is None:
            assert time.monotonic() < deadline, [log.read_text() for log in logs]
            time.sleep(0.05)
    finally:
        processes._kill(running)
    assert (running[0].returncode, running[1].returncode) == (0, -signal.SIGKILL), [log.read_text() for log in logs]
    why = r"WorkerError: worker 1 of 2 \(numbered from 0\) has failed: its process has died \(process "
    assert re.search(f"TOLD the checkpoint {folder}/step-00000002 {told}: {why}", logs[0].read_text())
    checkpoint = replicax.Checkpoint(model=[replicax.Variable(np.zeros(1000, np.float32)) for _ in range(4)])
    assert replicax.CheckpointManager(checkpoint, folder).restore_latest() == whole
    assert [float(v.value[0]) for v in checkpoint.model] == [0, 1, 2, 3]
