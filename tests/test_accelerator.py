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
import numpy as np
import pytest
from flax import nnx

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
        session._part(accelerator.Part(name, 3 if name == "hangs" else 60))
    fails, hangs, ends = session.found["parts"]
    assert (fails["state"], fails["words"]) == ("failed", "exit code 1: no such device")
    assert (hangs["state"], hangs["words"]) == ("ended", "did not end within 3 s")
    assert ends["state"] == "done"
    assert [row["name"] for row in session.found["checks"]] == ["fails", "hangs", "ends"]  # what they have found stays


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_checks_pass_here(parts, monkeypatch, count) -> None:
    devices = jax.local_devices()[:count]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    rows = list(parts["checks"].checks())
    assert len(rows) == len(parts["checks"].CHECKS)
    assert [row for row in rows if not row["passed"]] == []


def test_a_check_that_fails_is_a_row(parts, monkeypatch) -> None:
    def fails(devices: Any) -> float:
        raise RuntimeError("no\nsuch thing")

    monkeypatch.setattr(parts["checks"], "CHECKS", {"bad": fails, "far": lambda devices: 0.5})
    bad, far = parts["checks"].checks()
    assert (bad["passed"], bad["words"], bad["difference"]) == (False, "RuntimeError: no such thing", None)
    assert (far["passed"], far["difference"]) == (False, 0.5)


@pytest.mark.parametrize("model", ["mlp", "cnn", "transformer"])
def test_models_of_nnx_are_as_large(parts, model) -> None:
    problems = parts["problems"]
    made = problems.problem(model, problems.SMALL, 2)
    module = problems.nnx_model(model, problems.SMALL)
    parameters = jax.tree.leaves(nnx.state(module, nnx.Param))
    assert sum(x.size for x in parameters) == sum(x.size for x in made.initial)
    losses = [made.losses(made.initial, *made.batch), problems.nnx_losses(model, module, made.batch)]
    assert losses[0].shape == losses[1].shape == (2 * problems.SMALL.examples[model],)
    assert all(np.isfinite(x).all() for x in losses)


def test_the_large_transformer_is_gpt2(parts) -> None:
    problems = parts["problems"]
    assert problems.title("transformer", problems.FULL) == "transformer 124M"
    assert problems.sizes_for("full", 18 * 10**9).examples["transformer"] == 1
    assert problems.sizes_for("full", 60 * 10**9).examples["transformer"] == 8


@pytest.mark.soak
def test_times_and_plans_of_a_model(parts, monkeypatch) -> None:
    training, sizes = parts["training"], parts["problems"].SMALL
    rows = list(training.training("mlp", sizes, 2, 0.05))
    assert [row.get("way", row["table"]) for row in rows] == ["run", "plans", "run_steps", "NNX"]
    assert all(row["ratio"] > 0 for row in rows if row["table"] == "training")
    assert rows[1]["words"] == ""
    assert rows[1]["predicted_s"] > 0

    def refuses(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no text")

    monkeypatch.setattr(training.replicax, "plan", refuses)
    rows = list(training.training("mlp", sizes, 1, 0.02))
    assert (rows[1]["words"], rows[1]["predicted_s"], len(rows)) == ("RuntimeError: no text", None, 4)
    [memory] = training.memory("mlp", sizes, 2, "hand")
    assert memory["peak"] is None  # CPUs don't tell


def test_sums(parts, monkeypatch) -> None:
    devices = jax.local_devices()[:2]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    first, second = parts["sums"].all_reduce(2**15, 0.02)
    assert (first["bytes"], second["bytes"]) == (4096, 32768)
    assert first["bandwidth"] == pytest.approx(4096 / first["seconds"])
    assert first["predicted_s"] > 0


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
