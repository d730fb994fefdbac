"""``benchmarks/accelerator.py``, tried here on emulated devices: the command, an interrupt, and what it writes."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import pytest

SCRIPT = pathlib.Path(__file__).parent.parent / "benchmarks" / "accelerator.py"


@pytest.fixture
def modules(monkeypatch) -> dict[str, ModuleType]:
    """Those of the benchmark that need no process of their own."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import accelerator
    from _accelerator import picture, report

    return {"accelerator": accelerator, "picture": picture, "report": report}


@pytest.fixture
def parts(monkeypatch) -> Iterator[dict[str, ModuleType]]:
    """The parts themselves, run here, with JAX's own promotion of dtypes, as on a user's machine."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from _accelerator import checks, problems, sums, training

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield {"checks": checks, "problems": problems, "sums": sums, "training": training}


def run(out: pathlib.Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), "--quick", "--devices", "2", "--out", str(out), *arguments]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def written(out: pathlib.Path) -> dict[str, Any]:
    [path] = out.glob("*.json")
    assert path.name == "accelerator-emulated-cpu-x2.json"
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "EMULATED CPU DEVICES: a rehearsal" in path.with_suffix(".md").read_text()
    return json.loads(path.read_text())


@pytest.mark.soak
def test_a_run_that_is_saved_and_goes_on_in_another_process(tmp_path) -> None:
    process = run(tmp_path, "--only", "save|resume|exact")
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, output + errors
    found = written(tmp_path)
    assert [part["state"] for part in found["parts"]] == ["done"] * 4
    assert found["exact"][0]["passed"]
    first, second = found["checkpoint"]
    assert (first["same_bits"], first["same_bits_later"]) == (True, True)
    assert (second["same_bits"], second["same_bits_later"]) == (True, True)
    assert first["process"] != second["process"]
    assert "Restored in another process" in output


def test_an_interrupt_keeps_what_there_is(tmp_path) -> None:
    process = run(tmp_path, "--only", "checks")
    deadline = time.monotonic() + 200
    path = tmp_path / "accelerator-emulated-cpu-x2.json"
    assert process.stdout is not None
    for line in process.stdout:  # wait until the checks have begun
        if "checks" in line or time.monotonic() > deadline:
            break
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    found = written(tmp_path)
    assert found["interrupted"]
    assert found["parts"][-1] == {**found["parts"][-1], "name": "checks", "state": "interrupted"}
    assert "Interrupted: some parts are missing" in path.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--only", "("), "expected a regular expression, got '('"),
        (("--minutes", "0"), "--minutes must be above 0"),
        (("--out", "/proc/none"), "--out /proc/none: can't be written"),
    ],
)
def test_wrong_input_is_told_before_anything_runs(tmp_path, arguments, words) -> None:
    process = run(tmp_path, *arguments)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (2, "")
    assert words in errors


def test_a_part_that_fails_or_hangs(modules, monkeypatch, tmp_path, capsys) -> None:
    accelerator = modules["accelerator"]
    monkeypatch.setattr(accelerator, "HERE", tmp_path)
    (tmp_path / "accelerator.py").write_text(
        "import sys, time\n"
        "name = sys.argv[2]\n"
        'print(\'noise\'); print(\'@@{"table": "checks", "name": "\' + name + \'"}\', flush=True)\n'
        "if name == 'hangs': time.sleep(1000)\n"
        "if name == 'fails': sys.exit('no such device')\n"
    )
    options = modules["accelerator"].argparse.Namespace(minutes=20, devices=2, seconds=1.0, only=None, out=tmp_path)
    session = accelerator.Session(options)
    for name in ("fails", "hangs", "ends"):
        session._part(accelerator.Part(name, 1 if name == "hangs" else 60))
    fails, hangs, ends = session.found["parts"]
    assert (fails["state"], fails["words"]) == ("failed", "exit code 1: no such device")
    assert (hangs["state"], hangs["words"]) == ("ended", "did not end within 1 s")
    assert ends["state"] == "done"
    assert [row["name"] for row in session.found["checks"]] == ["fails", "hangs", "ends"]  # what they have found stays


@pytest.mark.parametrize(
    ("count", "every"), [(2, 3), pytest.param(2, 1, marks=pytest.mark.soak), pytest.param(1, 1, marks=pytest.mark.soak)]
)
def test_the_checks_pass_here(parts, monkeypatch, count, every) -> None:
    monkeypatch.setattr(parts["checks"], "CHECKS", dict(list(parts["checks"].CHECKS.items())[::every]))
    devices = jax.local_devices()[:count]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    rows = list(parts["checks"].checks())
    assert len(rows) == len(parts["checks"].CHECKS)
    assert [row for row in rows if not row["passed"]] == []
