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
    first = run(tmp_path, sys.executable, HERE / "custom_loop.py", 2).splitlines()
    losses = [float(re.search(r"loss ([\d.]+)", line)[1]) for line in first[:2]]
    assert losses[1] < losses[0]
    assert first[2] == "30 steps, saved 1"
    second = run(tmp_path, sys.executable, HERE / "custom_loop.py", 3).splitlines()
    assert float(re.search(r"epoch 2: loss ([\d.]+)", second[0])[1]) < losses[1]
    assert second[1] == "45 steps, saved 2"


@pytest.mark.soak  # tests/launcher and tests/cluster have each part
def test_several_workers_with_tf_config(tmp_path) -> None:
    out = run(tmp_path, *REPLICAX, "launch", "--workers", 2, "--devices-per-worker", 2, HERE / "multi_worker.py")
    assert "2 workers, 4 replicas: w = [1.0, -2.0, 3.0]" in out


@pytest.mark.soak  # tests/models, docs/models.md and the gallery have models of NNX
def test_nnx(tmp_path) -> None:
    trained, tested = re.search(
        r"train ([\d.]+), test ([\d.]+)", run(tmp_path, sys.executable, HERE / "nnx_script.py")
    ).groups()
    assert float(trained) > 0.7
    assert float(tested) > 0.85


@pytest.mark.soak  # docs/loop.md has each part
def test_a_loop_from_accelerate(tmp_path) -> None:
    out = run(tmp_path, sys.executable, HERE / "accelerate_loop.py")
    assert float(re.search(r"step 60: ([\d.]+)", out)[1]) > 0.9
    assert (tmp_path / "logs" / "evaluation.csv").read_text().startswith("step,accuracy")


@pytest.mark.soak  # tests/launcher/test_training.py kills a worker, too
def test_a_run_survives_the_death_of_a_worker(tmp_path) -> None:
    command = ["--workers", 2, "--devices-per-worker", 2, "--max-restarts", 3, HERE / "survives.py"]
    out = run(tmp_path, *REPLICAX, "launch", *command)
    assert (tmp_path / "killed").exists()
    assert "goes on after step" in out
    assert "step 400 on 4 replicas: w = [1.0, -2.0, 3.0]" in out


@pytest.mark.soak  # tests/cli/test_plan.py starts the command, too
def test_a_plan(tmp_path) -> None:
    out = run(tmp_path, *REPLICAX, "plan", HERE / "planned.py", "--strategy", "sharded", "--json", "plan.json")
    assert "step on 8 replicas" in out
    assert "all-gather" in out
    assert (tmp_path / "plan.json").exists()


NOTEBOOK = """
import ast, pathlib, sys
shown, names = [], {}
for cell in pathlib.Path(sys.argv[1]).read_text().split("# %%")[1:]:
    *body, last = ast.parse(cell.partition("\\n")[2]).body
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    html = getattr(value, "_repr_html_", lambda: None)()
    print(type(value).__name__, "html" if html else repr(value))
"""


@pytest.mark.soak  # docs/notebooks.md has the same
def test_a_notebook(tmp_path) -> None:
    lines = run(tmp_path, sys.executable, "-c", NOTEBOOK, HERE / "notebook.py").splitlines()
    assert [line.split()[0] for line in lines] == ["MirroredStrategy", "Variable", "PerReplica", "str", "Plan"]
    assert all(line.endswith("html") for line in (lines[0], lines[2], lines[4]))
    assert float(lines[3].split()[1].strip("'")) < 0.6
