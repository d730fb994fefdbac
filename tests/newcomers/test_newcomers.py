"""Programs that newcomers write from the README and the pages alone, run as they would: from a shell, in a folder.

Whatever stops one of them is a fault of a message or a page.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests import forked
from tests.forked import import_path

HERE = pathlib.Path(__file__).parent
REPLICAX = [sys.executable, "-m", "replicax"]


def run(folder: pathlib.Path, *command: object, warnings: str = "error") -> str:
    """What a command prints; it fails if the command does, and warnings are errors."""
    settings = {"PYTHONPATH": import_path(), "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": warnings, "COLUMNS": "100"}
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_keras(tmp_path) -> None:
    if importlib.util.find_spec("keras") is None:
        pytest.skip("Keras is not installed")
    # Keras' own variables tell NumPy 2 nothing of copies.
    out = run(tmp_path, sys.executable, HERE / "keras_fit.py", warnings="error,ignore::DeprecationWarning")
    accuracy, shape = re.search(r"accuracy ([\d.]+), (.*)", out).groups()
    assert (float(accuracy) > 0.9, shape) == (True, "(8, 2)")
    assert (tmp_path / "log.csv").read_text().startswith("epoch,accuracy,loss,val_accuracy,val_loss")


def test_a_loop_from_tensorflow_goes_on_from_its_checkpoint(tmp_path) -> None:
    first = run(tmp_path, sys.executable, HERE / "custom_loop.py", 2, "ckpt").splitlines()
    losses = [float(re.search(r"loss ([\d.]+)", line)[1]) for line in first[:2]]
    assert losses[1] < losses[0]
    assert first[2] == "30 steps, saved 1"
    # The second run needs no shell: it is forked from a process that has imported all that it needs.
    log, environment = tmp_path / "log", {**os.environ, "JAX_PLATFORMS": "cpu"}
    arguments = ["3", str(tmp_path / "ckpt")]
    ended = forked.start("tests.newcomers.custom_loop", arguments, log, environment, tmp_path).wait()
    assert ended == 0, log.read_text()
    second = log.read_text().splitlines()
    assert float(re.search(r"epoch 2: loss ([\d.]+)", second[0])[1]) < losses[1]
    assert second[1] == "45 steps, saved 2"


@pytest.mark.soak  # tests/launcher/test_training.py kills a worker, too
def test_a_run_survives_the_death_of_a_worker(tmp_path) -> None:
    command = ["--workers", 2, "--devices-per-worker", 2, "--max-restarts", 3, HERE / "survives.py"]
    out = run(tmp_path, *REPLICAX, "launch", *command)
    assert (tmp_path / "killed").exists()
    assert "goes on after step" in out
    assert "step 400 on 4 replicas: w = [1.0, -2.0, 3.0]" in out
