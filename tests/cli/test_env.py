"""``replicax env``, ``replicax --version`` and ``python -m replicax``: what people type before they ask for help."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import pathlib
import re
import subprocess
import sys
import tomllib

import jax
import pytest

import replicax
from replicax.cli import main
from replicax.cli.diagnosis import device_check, environment_variables
from replicax.cli.diagnosis.findings import ok, wrong
from tests.cli.unread_output import unread_output


@pytest.fixture
def devices(monkeypatch):
    """Has the devices be what the test says, as there is no need to ask JAX in a process of its own again."""

    def answer(*findings):
        monkeypatch.setattr(device_check, "check", lambda seconds: [*findings])

    answer(ok("devices", "8 × NVIDIA H100 80GB HBM3 (gpu), 59.5 GiB each"), ok("compiler", "a small program: 0.1 s"))
    monkeypatch.setattr(environment_variables, "environment_at_start", lambda: {"NCCL_DEBUG": "INFO", "HOME": "/me"})
    return answer


def test_the_version(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"replicax {replicax.__version__}\n"


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "replicax"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"replicax {replicax.__version__}\n", "")
    done = subprocess.run([*command, "no"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("replicax: error: argument command: invalid choice: 'no'")
    assert len(done.stderr.splitlines()) == 1


def test_what_to_paste_into_an_issue(devices, capsys, tmp_path, monkeypatch) -> None:
    for folder in ("left_by_pip-1.0.dist-info", "optax-0.0.1.dist-info"):  # the second is hidden by the one before it
        (tmp_path / folder).mkdir()
    (tmp_path / "optax-0.0.1.dist-info" / "METADATA").write_text("Name: optax\nVersion: 0.0.1\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"replicax:    {replicax.__version__}"
    assert lines[2].startswith("platform:    Linux-")
    assert lines[3] == f"packages:    jax {jax.__version__}"
    assert "devices:     8 × NVIDIA H100 80GB HBM3 (gpu), 59.5 GiB each" in lines
    assert "environment: NCCL_DEBUG=INFO" in lines
    assert lines[-1] == "problems:    none"
    text = "\n".join(lines)
    assert "/me" not in text  # variables that don't matter stay at home
    assert "pytest" not in text  # as do packages for working on Replicax
    assert f" optax {importlib.metadata.version('optax')}" in text


def test_what_is_not_well_is_in_it(devices, capsys) -> None:
    devices(wrong("devices", "importing JAX did not end within 20.0 s", "find out why"))
    assert main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "devices" not in report
    assert "devices: importing JAX did not end within 20.0 s" in report["problems"]
    assert report["environment"] == {"NCCL_DEBUG": "INFO"}


def test_characters_that_the_encoding_of_the_output_lacks(devices) -> None:
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii") as output, contextlib.redirect_stdout(output):
        assert main(["env"]) == 0
        assert rb"8 \xd7 NVIDIA H100" in output.buffer.getvalue()


def test_an_output_that_nobody_reads(devices, capsys) -> None:
    with unread_output():
        assert main(["env"]) == 141
    assert capsys.readouterr().err == ""


def test_an_output_that_can_not_be_written(devices, capsys) -> None:
    with open("/dev/full", "w") as full, contextlib.redirect_stdout(full):
        assert main(["env"]) == 1
    assert capsys.readouterr().err == "replicax: error: standard output can't be written (No space left on device)\n"


def test_closed_standard_streams(devices, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with contextlib.redirect_stdout(None):
        assert main(["env"]) == 1
        sys.stdout.close()
    assert capsys.readouterr().err == "replicax: error: standard output can't be written (Bad file descriptor)\n"
    with sys.stdin as stdin, pytest.raises(OSError, match="Bad file descriptor"):
        stdin.read()


def test_errors_do_not_go_to_standard_output_if_standard_error_is_closed(capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    assert main(["env", "--unknown"]) == 2
    sys.stderr.close()
    assert capsys.readouterr().out == ""


def test_jax_has_the_extras_that_ours_bring() -> None:
    root = pathlib.Path(__file__).parent.parent.parent
    ours = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    brought = {name: re.findall(r"^jax\[([\w-]+)\]", " ".join(needed)) for name, needed in ours.items()}
    brought = {name: extras for name, extras in brought.items() if extras}
    assert brought == {"cuda12": ["cuda12"], "cuda13": ["cuda13"], "tpu": ["tpu"], "gpu-plan": ["cuda12-local"]}
    assert {"cuda12", "cuda13", "tpu", "cuda12-local"} <= {
        *importlib.metadata.metadata("jax").get_all("Provides-Extra")
    }
