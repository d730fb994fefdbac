"""The character model, as its users run it: two worker processes, with files of their own, killed or not; or one."""

from __future__ import annotations

import csv
import re
import sys

import jax
import pytest

from examples import characters
from tests.compiler import HURRIED
from tests.launcher.launches import ROOT, launched

# The example, but for the size of its model: the steps would take most of the time. In each attempt the worker whose
# number stands there, if any, is killed when the attempt has saved.
SMALL = f"""
import glob, os, signal, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from examples import characters
characters.WIDTH, characters.LENGTH = 32, 12

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
    *("--text", str(ROOT / "docs" / "*.md"), "--files", "3", "--steps", "100", "--checkpoints", "saved"),
]


@pytest.mark.soak  # tests/launcher and tests/chaos kill workers of a smaller program
def test_killed_workers_end_where_others_do(tmp_path) -> None:
    """The chief is killed, and then the other, each when its attempt has saved."""
    curves = []
    for killed in ((), (0, 1)):
        (folder := tmp_path / str(killed)).mkdir()
        launch = launched(folder, *COMMAND, script=f"KILLED = {killed}{SMALL}", **HURRIED)
        assert launch.code == 0, launch.stderr
        assert launch.stdout.count("goes on after step") == len(killed)
        assert "policy FILE" in launch.stdout
        rows = csv.DictReader((folder / "saved" / "train.csv").read_text().splitlines())
        curves.append([(int(row["step"]), float(row["bits per character"])) for row in rows])
    assert curves[0] == curves[1]
    assert [step for step, _ in curves[0]] == [20, 40, 60, 80, 100]
    assert curves[0][-1][1] < 4.5  # of more than 6: the text is that of the pages, so it grows with them


def test_without_the_launcher_it_is_one_worker(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(characters, "WIDTH", 32)
    monkeypatch.setattr(characters, "LENGTH", 12)
    words = ["--text", str(ROOT / "docs" / "metrics.md"), "--steps", "4", "--checkpoints", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["characters.py", *words])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        characters.main()
    [bits] = re.findall(r"step 4 of 4 .*bits per character[ =]*([\d.]+)", capsys.readouterr().out)
    assert float(bits) < 8
