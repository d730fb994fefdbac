"""The character model, as its users run it: two worker processes, with files of their own, killed or not; or one."""

from __future__ import annotations

import csv
import glob
import os
import pathlib
import re
import signal

import jax
import numpy as np
import pytest

import replicax
from examples import characters
from tests.compiler import HURRIED
from tests.conftest import strategy_of
from tests.launcher.launches import ROOT, Launch, launched, marked

STEPS = 100
WIDTH, LENGTH = 32, 24
GOES_ON = "goes on after step"
# The example, but for the size of its model: the steps would take most of the time.
SMALL = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from examples import characters
characters.WIDTH, characters.LENGTH = {WIDTH}, {LENGTH}
characters.main()
"""
COMMAND = [
    *("--workers", "2", "--devices-per-worker", "2", "--backoff", "0", "train.py"),
    *("--text", str(ROOT / "docs" / "*.md"), "--files", "3", "--steps", str(STEPS), "--checkpoints", "saved"),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A launch that nothing happens to."""
    return launched(tmp_path_factory.mktemp("uninterrupted"), *COMMAND, script=SMALL, **HURRIED)


def test_two_workers_learn_from_real_text(uninterrupted) -> None:
    assert uninterrupted.code == 0, uninterrupted.stderr
    bits = curve(uninterrupted.folder)
    assert [step for step, _ in bits] == list(range(characters.EVERY, STEPS + 1, characters.EVERY))
    assert [b for _, b in bits] == sorted((b for _, b in bits), reverse=True)
    assert bits[-1][1] < 4.5  # of more than 6: the text is that of the pages, so it grows with them
    assert "policy FILE" in uninterrupted.stdout
    assert re.search(rf"^\[0\] step {STEPS} of {STEPS} .*bits per character", uninterrupted.stdout, re.MULTILINE)
    assert not re.search(r"^\[1\] step", uninterrupted.stdout, re.MULTILINE)


@pytest.mark.parametrize("killed", [(0,), pytest.param((0, 1), marks=pytest.mark.soak)], ids=["chief", "both"])
def test_killed_workers_end_where_others_do(uninterrupted, tmp_path, monkeypatch, killed) -> None:
    """The chief is killed, or first it and then the other, each when its attempt has saved."""
    monkeypatch.setattr(characters, "WIDTH", WIDTH)
    with Launch(tmp_path, *COMMAND, script=SMALL, **HURRIED) as launch:
        began = 0
        for attempt, worker in enumerate(killed, start=1):
            launch.wait_until((tmp_path / "saved" / f"step-{began + characters.EVERY:08}").exists)
            os.kill(process_of(launch, worker), signal.SIGKILL)
            launch.wait_for(GOES_ON, attempt)
            began = int(re.findall(rf"{GOES_ON} (\d+) of {STEPS}", launch.stdout)[-1])
            assert began >= attempt * characters.EVERY
        assert launch.wait() == 0, launch.stderr
        assert launch.nothing_is_left(), launch.left()
    assert launch.stdout.count(GOES_ON) == len(killed)
    assert curve(tmp_path) == curve(uninterrupted.folder)
    for found, expected in zip(parameters(tmp_path), parameters(uninterrupted.folder), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_without_the_launcher_it_is_one_worker(tmp_path, capsys) -> None:
    strategy = replicax.MultiWorkerMirroredStrategy(["cpu:0", "cpu:1"])
    files = glob.glob(str(ROOT / "docs" / "metrics.md"))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        first = characters.train(strategy, files, tmp_path, 4)
        second = characters.train(strategy, files, tmp_path, 8)
    assert (first.step, second.resumed_at, second.step) == (4, 4, 8)
    assert second.numbers["bits per character"] < first.numbers["bits per character"] < 8
    assert "goes on after step 4 of 8" in capsys.readouterr().out


def curve(folder: pathlib.Path) -> list[tuple[int, float]]:
    """The steps that were logged, and what was."""
    rows = csv.DictReader((folder / "saved" / "train.csv").read_text().splitlines())
    return [(int(row["step"]), float(row["bits per character"])) for row in rows]


def parameters(folder: pathlib.Path) -> list[np.ndarray]:
    """Those of the last checkpoint, and the optimizer's slots."""
    with strategy_of(1).scope():
        checkpoint, *_ = characters.build()
    checkpoint.restore(folder / "saved" / f"step-{STEPS:08}", partial=True)  # without the place in the input
    return [v.numpy() for v in (*checkpoint.model, *checkpoint.optimizer.variables)]


def process_of(launch: Launch, worker: int) -> int:
    """The process of a worker."""
    for pid in marked(launch.mark):
        variables = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        parent = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]
        if f"JAX_PROCESS_ID={worker}".encode() in variables and int(parent) == launch.process.pid:
            return pid
    raise AssertionError(f"there is no worker {worker}: {launch.left()}")
