"""``benchmarks/accelerator.py``, tried here on emulated devices: the command, an interrupt, and what it writes."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from types import ModuleType
from typing import Any

import pytest

SCRIPT = pathlib.Path(__file__).parent.parent / "benchmarks" / "accelerator.py"


@pytest.fixture
def modules(monkeypatch) -> dict[str, ModuleType]:
    """Those of the benchmark that need no process of their own."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import accelerator
    from _accelerator import picture, report

    return {"accelerator": accelerator, "picture": picture, "report": report}


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
    process = run(tmp_path, "--only", "exact|checks")
    deadline = time.monotonic() + 200
    path = tmp_path / "accelerator-emulated-cpu-x2.json"
    assert process.stdout is not None
    for line in process.stdout:  # wait until the checks have begun
        if "checks" in line or time.monotonic() > deadline:
            break
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    found = written(tmp_path)
    assert found["interrupted"]
    assert found["parts"][-1] == {**found["parts"][-1], "name": "checks", "state": "interrupted"}
    assert "Interrupted: some parts are missing" in path.with_suffix(".md").read_text()


def test_time_that_is_over(tmp_path) -> None:
    process = run(tmp_path, "--minutes", "0.01")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "no device answered" in output


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
        session._part(accelerator.Part(name, 3 if name == "hangs" else 60))
    fails, hangs, ends = session.found["parts"]
    assert (fails["state"], fails["words"]) == ("failed", "exit code 1: no such device")
    assert (hangs["state"], hangs["words"]) == ("ended", "did not end within 3 s")
    assert ends["state"] == "done"
    assert [row["name"] for row in session.found["checks"]] == ["fails", "hangs", "ends"]  # what they have found stays


def figures() -> dict[str, Any]:
    """What a machine with eight GPUs might give."""
    about = {"model": "mlp", "title": "MLP 784-4096-4096-10", "devices": 8}
    compared = {
        "pairs": 100,
        "ratio": 1.0,
        "ratio_95": [0.9, 1.1],
        "a_ms": 2.0,
        "b_ms": 2.0,
        "examples_per_second": 1e6,
    }
    peaks = [
        {**about, "side": side, "peak": gib * 2**30, "limit": 60 * 2**30}
        for side, gib in (("replicax", 3), ("hand", 4))
    ]
    machine = {"cores": 96, "jax": "0.10.2"}
    return {
        "interrupted": False,
        "seconds": 900.0,
        "size": "full",
        "device": {
            "platform": "gpu",
            "kind": "NVIDIA H100 80GB HBM3",
            "count": 8,
            "memory": 60 * 2**30,
            "emulated": False,
            "software": ["PJRT C API", "cuda 12090"],
            "machine": machine,
        },
        "parts": [{"name": "sums", "state": "ended", "seconds": 120.0, "words": "did not end within 120 s"}],
        "checks": [{"name": "mirrored", "passed": False, "difference": 0.5, "words": "", "seconds": 1.0}],
        "training": [{**about, **compared, "way": "run"}, {**about, **compared, "way": "run_steps", "steps": 50}],
        "plans": [
            {**about, "measured_s": 0.002, "predicted_s": 0.001, "predicted_bytes": 2**31, "words": ""}
            | {"model_flops": 10**12, "peak_flops": 1e15},
            {
                **about,
                "devices": 1,
                "measured_s": 0.002,
                "predicted_s": None,
                "predicted_bytes": None,
                "words": "no text",
            }
            | {"model_flops": None, "peak_flops": None},
        ],
        "memory": peaks,
        "sums": [
            {"devices": 8, "bytes": 2**30, "seconds": 0.005, "bandwidth": 376e9, "link": 450e9, "predicted_s": 0.004}
            | {"step_over_jax": 1.02, "step_over_jax_95": [1.0, 1.1]}
        ],
        "checkpoint": [{"step": "resume", "restored_s": 0.1, "same_bits": True, "same_bits_later": False}],
    }


def test_what_is_written_of_gpus(modules, tmp_path) -> None:
    found = figures()
    text = modules["report"].markdown(found, "x.png")
    assert "**measured on 8 × NVIDIA H100 80GB HBM3.**" in text
    assert "EMULATED" not in text
    assert "| mirrored | **FAIL** | 5.0e-01 |" in text
    row = "| MLP 784-4096-4096-10 | 8 | 1.000 ms | 2.000 ms | 2.00 | 50.0% | 2 GiB | 3 GiB | 4 GiB |"
    assert row in text
    assert "MLP 784-4096-4096-10 on 1: no plan: no text" in text
    assert "| 1 GiB | 5,000.0 µs | 4,000.0 µs | 376.00 GB/s | 84% | 1.020 (1.000–1.100) |" in text
    assert "five steps later: **OTHER BITS**" in text
    assert "| sums | ended | 120.0 s | did not end within 120 s |" in text
    modules["picture"].draw(found, tmp_path / "x.png")
    path = modules["accelerator"].write(found, tmp_path)
    assert path.name == "accelerator-nvidia-h100-80gb-hbm3-x8.json"
    assert modules["accelerator"].failures(found) == ["check mirrored", "part sums: ended"]


def test_what_is_written_of_nothing(modules, tmp_path) -> None:
    found = {key: value for key, value in figures().items() if key in ("device", "interrupted")}
    assert modules["report"].markdown({**found, "parts": []}, "x.png").startswith("# 8 × NVIDIA H100")
    modules["picture"].draw({**found, "parts": []}, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000
