"""``replicax plan``: as a user would start it, and every wrong input."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys
import textwrap

import jax
import pytest
import rich.console

import replicax
from replicax.cli import main
from replicax.cli.user_function import check_keywords, load
from tests.cli.unread_output import unread_output

REPLICAX = [sys.executable, "-c", "import sys; from replicax.cli import main; sys.exit(main())"]
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

MODEL = """
import jax, jax.numpy as jnp, replicax
SIZE = 64
def plan(strategy):
    with strategy.scope():
        w = replicax.Variable(lambda: jnp.zeros((SIZE, SIZE)), name="w", aggregation="mean")
    def step(x):
        return w.assign(jnp.tanh(x @ w)).value.sum()
    return step, jax.ShapeDtypeStruct((SIZE, SIZE), "float32")
def too_large(strategy):
    global SIZE
    SIZE = 60_000
    return plan(strategy)
def wrong(strategy):
    return lambda x: x
def differs(strategy):
    with strategy.scope():
        v = replicax.Variable(0.0, name="v")
    return (lambda x: v.assign(x)), jax.ShapeDtypeStruct((), "float32")
def broken(strategy):
    raise KeyError("layers")
def leaves(strategy):
    raise SystemExit(0)
def refused(strategy):
    return (lambda x: jnp.linalg.eig(x)[0]), jax.ShapeDtypeStruct((8, 8), "float32")
def sized(strategy, size, *, kind="small"):
    global SIZE
    SIZE = {"small": 2, "large": 3}[kind] * size
    return plan(strategy)
NUMBER = 3
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(textwrap.dedent(MODEL))
    return path


def replicax_command(*args, cwd=None, **env):
    return subprocess.run(
        [*REPLICAX, "plan", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, "JAX_PLATFORMS": "", "COLUMNS": "100", **env},
    )


@pytest.mark.parametrize("platforms", [pytest.param("", marks=pytest.mark.soak), "cpu"])
def test_the_example_on_tpus(tmp_path, platforms: str) -> None:
    page, data = tmp_path / "plan.html", tmp_path / "plan.json"
    done = replicax_command(
        os.path.join(ROOT, "examples", "digits.py"),
        *("--topology", "v5e:4x4", "--html", page, "--json", data),
        JAX_PLATFORMS=platforms,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # libtpu is quiet
    lines = done.stdout.splitlines()
    assert lines[0] == "train_step on 16 replicas, 16 × TPU v5 lite (4x4)"
    assert re.match(r"fits: needs [\d.]+ MiB on each device, of 15.75 GiB", lines[1])
    assert re.search(r"all-reduce +1 × +113.54 KiB +replica +16 ", done.stdout)
    assert "Predicted scaling" in done.stdout
    assert lines[-2:] == [f"Written: {page}", f"Written: {data}"]
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert json.loads(data.read_text())["replicas"] == 16


def test_on_emulated_cpus(model) -> None:
    done = replicax_command(model, "--replicas", 4, "--strategy", "sharded")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("step on 4 replicas, 4 × cpu\nneeds ")
    assert "whose memory is unknown" in done.stdout
    assert "Predicted" not in done.stdout


# --- in this process ------------------------------------------------------------------------------------


@pytest.fixture
def in_place(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("model", None)


def test_a_module_and_several_cores_for_a_replica(model, capsys, in_place) -> None:
    options = ["--topology", "v5p:2x2x2", "--logical", "1x2x1x1", "--strategy", "groups:2"]
    assert main(["plan", "model:plan", *options]) == 0
    printed = capsys.readouterr().out
    assert "float32[32,64]" in printed  # a variable of 64×64 in two pieces
    assert printed.startswith("step on 4 replicas, 8 × TPU v5 (2x2x2)\n")
    assert "mesh replica 4 × logical0 2" in printed


@pytest.mark.parametrize(("given", "width"), [(["size=32"], 64), (["size=32", "kind=large"], 96)])
def test_arguments_of_the_function(model, capsys, in_place, given: list[str], width: int) -> None:
    options = [text for one in given for text in ("--with", one)]
    assert main(["plan", f"{model}:sized", "--topology", "v5e:2x2", *options]) == 0
    assert f"float32[{width},{width}]" in capsys.readouterr().out


def test_several_slices(model, capsys, in_place) -> None:
    assert main(["plan", str(model), "--topology", "v5e:2x2", "--slices", "2", "--network", "3"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("step on 8 replicas, 8 × TPU v5 lite (2 slices of 2x2)\n")
    assert "Between slices a chip sends 3 GB/s." in " ".join(printed.split())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("too_large", r"^replicax plan: step does not fit: needs [\d.,]+ GiB on each device, of 15.75 GiB$"),
        ("differs", r"model.py:differs: LocalityError: variable 'v' .* differs between replicas"),
        ("leaves", r"model.py:leaves \(model.py:\d+\): SystemExit: 0"),
        ("broken", r"model.py:broken \(model.py:\d+\): KeyError: 'layers'"),
        ("refused", r"model.py:refused.*: CompilationError: the step '<lambda>' was traced, but can't be compiled"),
    ],
)
def test_what_can_not_run_fails(model, capsys, in_place, function: str, message: str) -> None:
    kept = model.with_name("kept.json")
    kept.write_text("{}")
    assert main(["plan", f"{model}:{function}", "--topology", "v5e:2x2", "--json", str(kept)]) == 1
    assert (kept.read_text() == "{}") == (function != "too_large")  # an earlier report stays until there is another
    printed = capsys.readouterr()
    assert re.search(message, printed.err, re.MULTILINE), printed.err
    assert ("The largest buffers" in printed.out) == (function == "too_large")


def test_a_decorator_that_gives_a_program_more_arguments() -> None:
    def program(strategy, width, size): ...

    check_keywords(functools.wraps(program)(lambda strategy, size: program(strategy, 3, size)), {"size": "1"}, "model")


def test_an_argument_may_have_any_name() -> None:
    check_keywords(lambda strategy, fn, args: (fn, args), {"fn": "relu", "args": "1"}, "model")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["missing.py"], "there is no file missing.py"),
        (["."], ". is a folder: expected a Python file, or a module"),
        (["no_suffix"], "no_suffix is a folder: expected a Python file, or a module"),
        (["./no_suffix/model"], "no_suffix/model: the name of a Python file must end in .py"),
        (["no_such_module:plan"], "no_such_module can't be imported: ModuleNotFoundError"),
        (["no-such-module"], "no-such-module can't be imported: ModuleNotFoundError"),
        (["{model}", "--chip", "unknown"], "with the fields of replicax.planning.Chip: "),
        (["{model}", "--chip", "list"], "with the fields of replicax.planning.Chip: "),
        (["{model}:nothing"], "has no function 'nothing'"),
        (["{model}:NUMBER"], "has no function 'NUMBER'"),
        (["{model}:a b"], "expected SCRIPT_OR_MODULE:FUNCTION"),
        ([":plan"], "expected SCRIPT_OR_MODULE:FUNCTION"),
        (["{model}:wrong", "--replicas", "8"], "must return (step, element_spec)"),
        (["{model}", "--topology", "v5e:3x3"], "'v5e:3x3' is not a TPU slice"),
        (["{model}", "--topology", "v9:4x4"], "there is no TPU generation 'v9'; known: v2, v3"),
        (
            ["{model}", "--topology", "telepathy"],
            "'telepathy' is no cluster of GPUs: no GPU is called 'telepathy'; known: ",
        ),
        (["{model}", "--topology", "v5e:4x4", "--replicas", "4"], "--replicas is for emulated CPU devices"),
        (["{model}", "--logical", "3"], "num_logical_devices must divide the number of devices"),
        (["{model}", "--topology", "v5p:2x2x2", "--logical", "3"], "no block of 3 cores divides 2x2x2x1 cores along"),
        (["{model}", "--batch", "12"], "a replica would have 3/2 examples of the batch: choose another batch"),
        (["{model}:differs", "--batch", "12"], "--batch 12: the element_spec of"),
        (["{model}", "--microbatches", "3"], "a replica would have 64/3 examples of the batch: choose another batch"),
        (["{model}", "--strategy", "groups:3"], "group_size 3 does not divide the number of replicas, 8"),
        (["{model}", "--slices", "2"], "--slices needs --topology"),
        (["{model}", "--topology", "v5e:4x4", "--slices", "0"], "--slices: must be at least 1, got 0"),
        (["{model}", "--topology", "v5e:4x4", "--network", "3"], "it needs --slices 2 or more"),
        (["{model}", "--topology", "h100:8", "--network", "3"], "slices 2 or more, or GPUs of several hosts"),
        (["{model}", "--topology", "v9:4x4", "--network", "3"], "there is no TPU generation 'v9'; known: v2, v3"),
        (["{model}", "--topology", "h100:9x9"], "a host has at most 8 h100 GPUs, got 9"),
        (["{model}", "--topology", "v100:8"], "no GPU is called 'v100'; did you mean h100? known: "),
        (["{model}", "--topology", "p5.48xlagre:2"], "of machines, p5.48xlarge and "),
        (["{model}", "--topology", "v5e:2x2", "--slices", "2", "--network", "nan"], "must be a positive number"),
        (["{model}", "--topology", "v4:2x2x1", "--slices", "2"], "chip can send to other slices or hosts: give it"),
        (["{model}", "--topology", "v5p:2x2x2", "--logical", "two"], "must be cores along x, y, z and on a chip"),
        (["{model}", "--topology", "v5p:2x2x2", "--logical", "1x1x4x1"], "exceeds the mesh"),
        (["{model}", "--replicas", "128"], "comes too late"),  # the devices of this process are made already
        (["{model}:sized", "--with", "size"], "--with: must be NAME=VALUE, such as size=70b, got 'size'"),
        (["{model}:sized", "--with", "size=1", "--with", "size=2"], "--with gives an argument twice: size"),
        (["{model}:sized", "--with", "kind=x"], "sized does not take these arguments: missing a required argument"),
        (["{model}", "--with", "size=1"], "does not take these arguments: got an unexpected keyword argument 'size'"),
        (["{model}", "--html", "nowhere/plan.html"], "there is no folder nowhere"),
        (["{model}", "--json", "{model}"], "model.py: can't be written (it is a program, or has the name of one)"),
        (["{model}", "--json", "."], "--json .: can't be written (it is a folder)"),
        (["{model}", "--json", "a" * 300], ": can't be written (File name too long)"),
        (["{model}", "--html", "a.out", "--json", "a.out"], "are both a.out, and the second would overwrite the first"),
        (["{fails}"], "fails.py ended the program while it was imported (sys.exit('no connection')): put what is"),
        (["{leaves}"], "leaves.py ended the program while it was imported (sys.exit(0)): put what is to run only when"),
        (
            ["{model}", "--strategy", "telepathy"],
            "must be mirrored, sharded or groups:N, such as groups:8, got 'telepathy'",
        ),
        ([], "the following arguments are required: SCRIPT_OR_MODULE"),
    ],
)
def test_wrong_input_is_one_line(model, capsys, in_place, args, message) -> None:
    assert jax.devices()
    leaves = model.with_name("leaves.py")
    leaves.write_text("import sys\nsys.exit(0)\n")
    fails = model.with_name("fails.py")  # its own pipe, not standard output
    fails.write_text("try:\n    raise BrokenPipeError\nexcept OSError:\n    raise SystemExit('no connection')\n")
    fields = {"name": "c", "flops": 1, "memory": 1, "bandwidth": 1}
    model.with_name("unknown").write_text(json.dumps({**fields, "speed": 2}))
    model.with_name("list").write_text(json.dumps([fields]))
    model.with_name("no_suffix").mkdir()
    model.with_name("no_suffix").joinpath("model").touch()
    files = {"{model}": model, "{leaves}": leaves, "{fails}": fails}
    for name, file in files.items():
        args = [a.replace(name, str(file)) for a in args]
    assert main(["plan", *args]) == 2
    assert sorted(p.name for p in model.parent.glob("*.*")) == sorted(map(os.path.basename, files.values()))
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert re.match(r"replicax( plan)?: error: ", printed.err)
    assert printed.err.count("\n") == 1


def test_a_script_imports_what_lies_beside_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_the_script.py").write_text("NUMBER = 7\n")
    script = tmp_path / "script_of_a_plan.py"
    script.write_text("import beside_the_script\ndef plan(strategy):\n    return beside_the_script.NUMBER\n")
    try:
        _, function = load(str(script))
        assert function(None) == 7
    finally:
        for name in ("beside_the_script", "script_of_a_plan"):
            sys.modules.pop(name, None)


def test_without_libtpu(model, capsys, in_place, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "libtpu", None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    assert main(["plan", str(model), "--topology", "v5e:2x2"]) == 2
    assert "libtpu, which is not installed: pip install 'replicax[tpu]'" in capsys.readouterr().err


def test_a_file_that_turns_out_not_to_be_writable(model, capsys, in_place, tmp_path, monkeypatch) -> None:
    """As on a disk that is full: the report is printed, the other file is written, and the exit status says it."""
    monkeypatch.setattr(replicax, "plan", lambda *args, **options: Found())
    assert main(["plan", str(model), "--html", "/dev/full", "--json", str(tmp_path / "plan.json")]) == 3
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["the report", f"Written: {tmp_path / 'plan.json'}"]
    assert printed.err == "replicax plan: /dev/full: can't be written (No space left on device)\n"
    assert (tmp_path / "plan.json").read_text() == "{}"


def test_the_file_is_written_though_nobody_reads_the_report(model, in_place, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(replicax, "plan", lambda *args, **options: Found())
    with unread_output():
        assert main(["plan", str(model), "--json", str(tmp_path / "plan.json")]) == 141
    assert (tmp_path / "plan.json").read_text() == "{}"


@pytest.mark.parametrize(
    "printed", ["print('read me')", "import rich.console; rich.console.Console().print('read me')"]
)
@pytest.mark.parametrize("where", ["", "def plan(strategy): "])
def test_a_model_that_prints_what_nobody_reads(where, printed, in_place, tmp_path, capsys) -> None:
    (tmp_path / "prints.py").write_text(where + printed)
    with unread_output():
        assert main(["plan", str(tmp_path / "prints.py")]) == 141
    assert capsys.readouterr().err == ""


BROKEN_PIPE = "raise BrokenPipeError(32, 'to my server')"


@pytest.mark.parametrize(
    ("program", "status", "error"),
    [
        (BROKEN_PIPE, 2, "BrokenPipeError: [Errno 32] to my server"),
        (f"def plan(strategy): {BROKEN_PIPE}", 1, "BrokenPipeError: [Errno 32] to my server"),
        ("exec('raise SystemExit(3)', {})", 2, "ended the program while it was imported (sys.exit(3))"),
    ],
)
def test_a_model_whose_own_pipe_is_broken_or_that_exits(program, status, error, in_place, tmp_path, capfd) -> None:
    (tmp_path / "pipes.py").write_text(program)
    for output in (sys.stdout, io.StringIO()):
        with contextlib.redirect_stdout(output):
            assert main(["plan", str(tmp_path / "pipes.py")]) == status
        assert "pipes.py" in (said := capfd.readouterr().err)
        assert error in said


class Found:
    fits = True

    def print(self) -> None:
        rich.console.Console().print("the report")

    def write_html(self, path) -> None:
        path.write_text("a page")

    def to_json(self) -> str:
        return "{}"
