"""``replicax demo``: one short run as a user would start it, and every wrong input."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import matplotlib.image
import numpy as np
import pytest

import replicax
from replicax.cli import demo, main

ROOT = pathlib.Path(__file__).parents[2]
REPLICAX = [sys.executable, "-c", "import sys; from replicax.cli import main; sys.exit(main())"]


def replicax_command(*args, **env):
    return subprocess.run(
        [*REPLICAX, *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "", "COLUMNS": "80", **env},
    )


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "made" / "for it"
    return out, replicax_command("demo", "--replicas", "2", "--epochs", "1", "--out", str(out))


def test_a_short_run_keeps_its_promises(short_run):
    _, done = short_run
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    cells = {row[0]: row[1:] for line in done.stdout.splitlines() if len(row := re.split(r"\s{2,}", line.strip())) > 1}
    assert cells["Times the step was traced"] == ["1", "1", "1", "met"]
    assert cells["All-reduces per step"][0] == "1"
    assert cells["Bytes reduced per step"][0] == "116,264"
    assert cells["Final accuracy differs by"] == ["0.00 points"]  # one epoch: nothing is promised
    assert re.search(r"Largest difference .* below 1e-5 +met", done.stdout)
    assert "parameter after 11 steps" in done.stdout


def test_no_progress_bar_where_there_is_no_terminal(short_run):
    _, done = short_run
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    assert len(done.stdout.splitlines()) < 25
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 80


def test_pictures(short_run):
    out, _ = short_run
    assert sorted(path.name for path in out.iterdir()) == ["replicas.png", "training.png"]
    for path in out.iterdir():
        pixels = matplotlib.image.imread(path)
        height, width, _ = pixels.shape
        assert height > 500
        assert width > 1500
        assert pixels[..., :3].std() > 0.05  # something is drawn


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--replicas", "0"], "--replicas: must be at least 1, got 0"),
        (["--replicas", "-2"], "--replicas: must be at least 1, got -2"),
        (["--replicas", "two"], "--replicas: must be a whole number, got 'two'"),
        (["--replicas", "3"], "a global batch of 128 does not divide over 3 replicas; choose one of 1, 2, 4, 8"),
        (["--epochs", "0"], "--epochs: must be at least 1, got 0"),
        (["--seed", "-1"], "--seed: must be from 0 to 2147483647, got -1"),
        (["--strategy", "telepathy"], "--strategy: invalid choice: 'telepathy'"),
        (["--strategy", "one_device", "--replicas", "2"], "one_device has 1 replica, got --replicas 2"),
        (["--out", "/dev/null/out"], "--out /dev/null/out: can't write there (Not a directory)"),
        (["--out", "taken"], "--out taken: taken/training.png can't be written (it is a folder)"),
        (["--replicas", "128"], "comes too late"),  # the devices of this process are made already
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_wrong_input_is_one_line(args, message, capsys, monkeypatch, tmp_path):
    assert 1 <= len(jax.devices()) < 128
    (tmp_path / "taken" / "training.png").mkdir(parents=True)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(demo.load_example(), "run", lambda *args: pytest.fail("started training"))
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *args]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert re.match(r"replicax( demo)?: error: ", printed.err)
    assert printed.err.count("\n") == 1


def test_no_command_at_all(capsys):
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("replicax: error: the following arguments are required: command")


def test_more_replicas_than_devices(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")  # asked for after the fact: the devices of this process stay
    assert main(["demo", "--replicas", "128", "--out", str(tmp_path)]) == 2
    assert "--replicas 128: each replica needs a device of its own, and there are " in capsys.readouterr().err


def test_a_platform_without_devices():
    done = replicax_command("demo", JAX_PLATFORMS="telepathy")
    assert done.returncode == 2
    assert done.stderr.startswith("replicax demo: error: JAX_PLATFORMS=telepathy: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("package", ["sklearn", "matplotlib"])
def test_a_package_is_missing(capsys, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["demo"]) == 2
    message = f"the demo needs the package {package}, which is not installed: pip install 'replicax[demo]'\n"
    assert message in capsys.readouterr().err


def test_the_example_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(replicax, "__file__", str(tmp_path / "src" / "replicax" / "__init__.py"))
    assert main(["demo"]) == 2
    places = f"{tmp_path}/src/replicax/_examples/digits_demo.py nor {tmp_path}/examples/digits_demo.py"
    assert f"the example is in neither {places}" in capsys.readouterr().err


def test_the_example_as_it_is_installed(monkeypatch, tmp_path):
    """A wheel has the examples in the package itself; nothing of what they import is looked for elsewhere."""
    demo.load_example()  # what is imported now comes back after the test
    package = tmp_path / "replicax"
    shutil.copytree(ROOT / "examples", package / "_examples")
    for name in [name for name in sys.modules if name.partition(".")[0] == "replicax_examples"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(replicax, "__file__", str(package / "__init__.py"))
    example = demo.load_example()
    for module in (example, example.digits, example.digits_pictures):
        assert pathlib.Path(module.__file__).parent == package / "_examples"


@pytest.mark.parametrize("options", [["--replicas", "1"], ["--strategy", "one_device"]])
def test_a_missed_target_is_named_and_fails(capsys, monkeypatch, tmp_path, options):
    example = demo.load_example()

    def trained(label, strategy, data, seed, epochs, console):
        with strategy.scope():
            variables = [replicax.Variable(np.zeros(3, np.float32), name="w")]
        drift = 0.0 if label == "one device" else 1e-3
        return example.Training(
            losses=[1.0] * 11 * epochs,
            accuracies=[0.96] * epochs,
            seconds=2.0,
            early_step=20,
            early=[np.full(3, drift)],
            variables=variables,
            traces=1,
        )

    monkeypatch.setattr(example, "train", trained)
    monkeypatch.setattr(demo, "_is_emulated", lambda: False)
    assert main(["demo", *options, "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "replicax demo: target missed: Test accuracy: 96.00%, should be at least 97%",
        "replicax demo: target missed: Largest difference of a parameter after 20 steps: 1.0e-03, should be below 1e-5",
    ]
