"""The character model, as its users run it: two worker processes, each with files of its own; or one."""

from __future__ import annotations

import glob
import re

import jax

import replicax
from examples import characters
from tests.compiler import HURRIED
from tests.launcher.launches import ROOT, launched

COMMAND = ["--workers", "2", "--devices-per-worker", "2", str(ROOT / "examples" / "characters.py")]


def test_two_workers_learn_from_real_text(tmp_path) -> None:
    arguments = ["--text", str(ROOT / "docs" / "*.md"), "--files", "3", "--epochs", "3"]
    launch = launched(tmp_path, *COMMAND, *arguments, **HURRIED)
    assert launch.code == 0, launch.stderr
    printed = launch.stdout
    bits = [float(x) for x in re.findall(r"\[0\] epoch \d   step +\d+   ([\d.]+) bits per character", printed)]
    assert len(bits) == 3  # too few lines for 20 steps: one at the end of each epoch
    assert bits == sorted(bits, reverse=True)
    assert min(bits) < 5
    assert "policy   FILE (AUTO: there are 3 files for 2 worker(s))" in printed
    owners = re.findall(r"worker (\d) reads (\d+) of 3 file\(s\)", printed)
    assert owners == [("0", "2"), ("1", "1")]
    assert "[1] epoch" not in printed


def test_without_the_launcher_it_is_one_worker() -> None:
    strategy = replicax.MultiWorkerMirroredStrategy(["cpu:0", "cpu:1"])
    said = []
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        bits = characters.train(strategy, glob.glob(str(ROOT / "docs" / "metrics.md")), 2, say=said.append)
    assert len(said) == 2
    assert bits[1] < bits[0] < 8
