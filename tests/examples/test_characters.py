"""The character model, as its users run it: two worker processes, with files of their own, killed or not; or one."""

from __future__ import annotations

import csv
import glob
import pathlib
import re

import jax
import numpy as np
import pytest

import replicax
from examples import characters
from tests.compiler import HURRIED
from tests.conftest import strategy_of
from tests.launcher.launches import ROOT, launched

STEPS = 100
WIDTH, LENGTH = 32, 12
GOES_ON = "goes on after step"
# The example, but for the size of its model: the steps would take most of the time. In each attempt the worker whose
# number stands there, if any, is killed when the attempt has saved.
SMALL = f"""
import glob, os, signal, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from examples import characters
characters.WIDTH, characters.LENGTH = {WIDTH}, {LENGTH}

def kill():
    began = saved()
    while saved() == began:
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)

def saved():
    return sorted(glob.glob("saved/step-????????"))

if dict(enumerate(KILLED)).get(int(os.environ["REPLICAX_ATTEMPT"])) == int(os.environ["JAX_PROCESS_ID"]):
    threading.Thread(target=kill, daemon=True).start()
characters.main()
"""
COMMAND = [
    *("--workers", "2", "--devices-per-worker", "2", "--backoff", "0", "train.py"),
    *("--text", str(ROOT / "docs" / "*.md"), "--files", "3", "--steps", str(STEPS), "--checkpoints", "saved"),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A launch that nothing happens to."""
    return launched(tmp_path_factory.mktemp("uninterrupted"), *COMMAND, script="KILLED = ()" + SMALL, **HURRIED)


@pytest.mark.soak  # tests/newcomers and tests/launcher have smaller programs of two workers
def test_two_workers_learn_from_real_text(uninterrupted) -> None:
    assert uninterrupted.code == 0, uninterrupted.stderr
    bits = curve(uninterrupted.folder)
    assert [step for step, _ in bits] == list(range(characters.EVERY, STEPS + 1, characters.EVERY))
    assert [b for _, b in bits] == sorted((b for _, b in bits), reverse=True)
    assert bits[-1][1] < 4.5  # of more than 6: the text is that of the pages, so it grows with them
    assert "policy FILE" in uninterrupted.stdout
    assert re.search(rf"^\[0\] step {STEPS} of {STEPS} .*bits per character", uninterrupted.stdout, re.MULTILINE)
    assert not re.search(r"^\[1\] step", uninterrupted.stdout, re.MULTILINE)


@pytest.mark.soak  # tests/launcher and tests/chaos kill workers of a smaller program
@pytest.mark.parametrize("killed", [(0,), (0, 1)], ids=["chief", "both"])
def test_killed_workers_end_where_others_do(uninterrupted, tmp_path, monkeypatch, killed) -> None:
    """The chief is killed, or first it and then the other, each when its attempt has saved."""
    monkeypatch.setattr(characters, "WIDTH", WIDTH)
    launch = launched(tmp_path, *COMMAND, script=f"KILLED = {killed}{SMALL}", **HURRIED)
    assert launch.code == 0, launch.stderr
    steps = [int(step) for step in re.findall(rf"{GOES_ON} (\d+) of {STEPS}", launch.stdout)]
    assert len(steps) == len(killed)
    assert all(step >= attempt * characters.EVERY for attempt, step in enumerate(steps, start=1))
    assert curve(tmp_path) == curve(uninterrupted.folder)
    for found, expected in zip(parameters(tmp_path), parameters(uninterrupted.folder), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_without_the_launcher_it_is_one_worker(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(characters, "WIDTH", WIDTH)
    monkeypatch.setattr(characters, "LENGTH", LENGTH)
    strategy = replicax.MultiWorkerMirroredStrategy(["cpu:0", "cpu:1"])
    files = glob.glob(str(ROOT / "docs" / "metrics.md"))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        run = characters.train(strategy, files, tmp_path, 4)
    assert run.step == 4
    assert run.numbers["bits per character"] < 8


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
