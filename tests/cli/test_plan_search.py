"""``replicax plan --search``: what is varied, cases in processes of their own, their order, and every end of it."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import doctest
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import jax
import pytest

from replicax.cli import main, plan
from replicax.cli.search import case_processes, choices, plan_search
from replicax.cli.search.case_processes import outcomes
from replicax.cli.search.choices import SearchCase
from replicax.cli.search.ranking import CaseOutcome
from replicax.planning.strategy_spec import strategy_of
from tests.cli.unread_output import unread_output

REPLICAX = [sys.executable, "-c", "import sys; from replicax.cli import main; sys.exit(main())"]

MODEL = """
import jax, jax.numpy as jnp, replicax
SEARCH = {"width": [32, 64]}
def plan(strategy, width=16, kind=None):
    if width == 7:
        raise KeyError("layers")
    with strategy.scope():
        w = replicax.Variable(lambda: jnp.zeros((width, width)), name="w", aggregation="mean")
    def step(x):
        return w.assign(jnp.tanh(x @ w)).value.sum()
    return step, jax.ShapeDtypeStruct((width, width), "float32")
"""

CHIP = {"name": "small", "flops": 1e12, "memory": 2**15, "bandwidth": 1e9, "link": 1e9, "links": 1}


@pytest.fixture
def model(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "chip.json").write_text(json.dumps(CHIP))
    (tmp_path / "model.py").write_text(textwrap.dedent(MODEL))
    yield tmp_path / "model.py"
    sys.modules.pop("model", None)


def found(seconds: float, fits: bool = True, examples: int = 8, total: int = 2**20, **more: object) -> dict:
    estimate = {"at_least": seconds / 2, "bound_by": "memory"}
    memory = {"total": total, "capacity": 2**30}
    return {
        "fits": fits,
        "memory": memory,
        "estimate": estimate,
        "timeline": {"seconds": seconds},
        "examples": examples,
        "replicas": 8,
        **more,
    }


def case(name: str) -> SearchCase:
    return SearchCase((("strategy", name),))


# --- as a user would start it ---------------------------------------------------------------------------


def test_a_search_on_emulated_devices(model) -> None:
    """One case is best, one does not fit, which is known before it is compiled, and one fails; all in one table."""
    search = ["--search", "strategy=sharded", "microbatches=1", "width=7,256,32"]
    done = subprocess.run(
        [*REPLICAX, "plan", "model.py", "--replicas", "4", "--chip", "chip.json", *search, "--json", "found.json"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "JAX_PLATFORMS": ""},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    data = json.loads((model.parent / "found.json").read_text())
    assert data["unfinished"] == []
    best, too_large, broken = data["cases"]
    assert best["state"] == "fits"
    assert best["case"] == {"strategy": "sharded", "microbatches": "1", "width": "32"}
    assert best["seconds"] > 0
    assert (best["examples"], best["replicas"]) == (4 * 32, 4)
    assert too_large["state"] == "does not fit"
    assert too_large["reason"] == "its variables alone need 64.00 KiB of 32.00 KiB"
    assert (broken["state"], broken["reason"]) == ("failed", "model.py (model.py:6): KeyError: 'layers'")
    assert done.stdout.endswith(f"\n{best['command']}\nWritten: found.json\n")  # which can be typed: the same plan
    assert best["command"].endswith(" --batch 128 --chip chip.json")
    lines = [line.split("  ")[:2] for line in done.stdout.splitlines() if " of 3  sharded, " in line]
    assert sorted(line[0] for line in lines) == ["1 of 3", "2 of 3", "3 of 3"]


# --- without compiling anything -------------------------------------------------------------------------


@pytest.fixture
def faked(monkeypatch):
    """Cases whose outcomes are given, in any order, instead of processes."""

    def fake(*results: CaseOutcome | BaseException) -> list[list[str]]:
        asked: list[list[str]] = []

        def outcomes(cases, arguments, jobs, deadline, folder):
            asked.extend(list(arguments(case)) for case in cases)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
                yield result

        monkeypatch.setattr(plan_search, "outcomes", outcomes)
        return asked

    return fake


def test_the_order_of_a_search(model, capsys, faked) -> None:
    asked = faked(
        CaseOutcome.of(case("a"), found(2.0)),
        CaseOutcome.of(case("e"), found(9.0, fits=False, total=2**40, is_pruned=True)),
        CaseOutcome.failed(case("c"), "KeyError"),
        CaseOutcome.of(case("d"), found(1.0)),
        CaseOutcome.of(case("b"), found(9.0, fits=False, total=2**31)),
    )
    given = ["--chip", "chip.json", "--strategy", "sharded", "--with", "kind=x", "--search", "microbatches=2"]
    assert main(["plan", "model.py", *given]) == 0
    common = ["model.py", "--strategy", "sharded", "--with", "kind=x", "--microbatches", "2"]
    assert asked == [[*common, "--with", f"width={width}", "--chip", "chip.json"] for width in (32, 64)]
    table = capsys.readouterr().out.partition("strategy ")[2].splitlines()[1:]
    cells = [line.split()[0] for line in table if line.strip()]
    assert [cell for cell in cells if cell in "abcde"] == ["d", "a", "b", "e", "c"]


def test_cases_of_other_batches_are_in_the_order_of_the_time_for_an_example(model, capsys, faked) -> None:
    faked(CaseOutcome.of(case("a"), found(2.0, examples=8)), CaseOutcome.of(case("b"), found(3.0, examples=16)))
    assert main(["plan", "model.py", "--chip", "chip.json", "--search", "strategy=mirrored", "microbatches=1"]) == 0
    table = capsys.readouterr().out.partition("strategy ")[2]
    assert [line.split()[:2] for line in table.splitlines() if line.strip()[:2] in ("a ", "b ")] == [
        ["b", "16"],
        ["a", "8"],
    ]
    assert "The cases differ in the examples of a step" in table


def test_a_search_whose_output_nobody_reads_goes_on_for_its_file(model, faked) -> None:
    faked(CaseOutcome.of(case("a"), found(2.0)), CaseOutcome.of(case("b"), found(1.0)))
    given = ["--chip", "chip.json", "--search", "strategy=mirrored", "microbatches=1"]
    with unread_output():
        assert main(["plan", "model.py", *given, "--json", "found.json"]) == 0
    assert len(json.loads((model.parent / "found.json").read_text())["cases"]) == 2


@pytest.mark.parametrize(
    ("results", "status", "message"),
    [
        ([CaseOutcome.of(case("a"), found(1.0)), KeyboardInterrupt()], 130, "interrupted: 2 of 2 cases are not known"),
        ([KeyboardInterrupt()], 130, "interrupted: 2 of 2 cases are not known"),
        ([CaseOutcome.failed(case("a"), "it is late")], 1, "none of 2 cases fits"),
        ([CaseOutcome.of(case("a"), found(1.0, fits=False))], 1, "none of 2 cases fits"),
    ],
)
def test_the_ends_of_a_search(model, capsys, faked, results, status, message) -> None:
    faked(*results)
    given = ["--chip", "chip.json", "--search", "strategy=mirrored", "microbatches=1", "--json", "found.json"]
    assert main(["plan", "model.py", *given]) == status
    printed = capsys.readouterr()
    assert message in printed.out + printed.err
    data = json.loads((model.parent / "found.json").read_text())
    assert len(data["cases"]) == len([r for r in results if isinstance(r, CaseOutcome)])
    assert len(data["unfinished"]) == 2  # the outcomes here are of other cases


def test_sigterm_while_devices_are_measured_ends_all(model, monkeypatch, capsys) -> None:
    signals = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    monkeypatch.setattr(plan_search, "_MEASURE", signals)
    (folder := model.parent / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("as without a search"))
    try:
        began = time.monotonic()
        assert main(["plan", "model.py", "--search", "microbatches=1"]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert time.monotonic() - began < 30
    assert list(folder.iterdir()) == []
    assert "interrupted" in capsys.readouterr().err


def test_emulated_devices_are_measured_for_a_search(model, monkeypatch, capsys, faked) -> None:
    asked = faked(KeyboardInterrupt())
    search = ["plan", "model.py", "--replicas", "4", "--search", "strategy=mirrored", "microbatches=1", "width=32"]
    monkeypatch.setattr(plan_search, "_MEASURE", "import sys; assert sys.argv[2] == '4'; open(sys.argv[1], 'w')")
    with concurrent.futures.ThreadPoolExecutor() as threads:  # where no signal can be caught
        assert threads.submit(main, search).result() == 130
    assert pathlib.Path(asked[0][-1]).name == "chip.json"
    monkeypatch.setattr(plan_search, "_MEASURE", "import sys; sys.exit('Traceback\\nno memory')")
    assert main(search) == 2
    assert capsys.readouterr().err == "replicax plan: error: the emulated devices can't be measured: no memory\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--search", "microbatches"], "expected NAME=VALUE,VALUE, such as microbatches=1,2,4, got 'microbatches'"),
        (["--search", "microbatches="], "expected NAME=VALUE,VALUE, such as microbatches=1,2,4, got 'microbatches='"),
        (["--search", "microbatches=0"], "--search microbatches=0: must be at least 1, got 0"),
        (["--search", "microbatches=1,1"], "--search has a value of microbatches twice: 1"),
        (
            ["--search", "strategy=mirrored,split"],
            "must be mirrored, sharded or groups:N, such as groups:8, got 'split'",
        ),
        (["--search", "logical=2x"], "--search logical=2x: must be cores along x, y, z and on a chip"),
        (["--search", "width=1", "width=2"], "--search has width twice: give all of its values at once"),
        (
            ["--search", "depth=1"],
            "--search: model.py does not take these arguments: got an unexpected keyword argument",
        ),
        (
            ["--with", "depth=1", "--search"],
            "--with: model.py does not take these arguments: got an unexpected keyword argument 'depth'",
        ),
        (["--with", "width=8", "--search", "width=1"], "width is given, and --search varies it"),
        (["--microbatches", "2", "--search", "microbatches=1"], "microbatches is given, and --search varies it"),
        (
            ["--microbatches", "2", "--strategy", "sharded", "--with", "width=8", "--search"],
            "--search has nothing to vary: all choices are given",
        ),
        (["--search", "--html", "page.html"], "--html is the page of one plan"),
        (["--search", "--topology", "v9:4x4"], "there is no TPU generation 'v9'"),
        (["--search", "--topology", "v4:2x2x1", "--slices", "2"], "can send to other slices or hosts: give it"),
        (["--search", "--deadline", "0"], "must be a positive number, got '0'"),
        (["--search", "--chip", "missing.json"], "--chip missing.json: expected a JSON object with the fields of"),
        (["--with", "kind=1", "--with", "kind=2", "--search"], "--with gives an argument twice: kind"),
        (["--deadline", "2"], "--deadline is about the cases of a search: it needs --search"),
        (["--jobs", "2"], "--jobs is about the cases of a search: it needs --search"),
    ],
)
def test_a_wrong_search_is_one_line(model, capsys, args, message) -> None:
    assert main(["plan", "model.py", *args]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ("['width']", "SEARCH of model must be a dict from names to lists of values, got ['width']"),
        ("{'width': 3}", "SEARCH of model must have a list of values of 'width', got 3"),
        ("{'width': 'wide'}", "SEARCH of model must have a list of values of 'width', got 'wide'"),
        ("{'width': []}", "SEARCH of model has no value of width"),
    ],
)
def test_a_wrong_offer_of_a_program(model, capsys, declared, message) -> None:
    model.write_text(model.read_text().replace('{"width": [32, 64]}', declared))
    assert main(["plan", "model.py", "--search"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("devices", "groups"),
    [
        (["--replicas", "32", "--logical", "2"], 4),
        (["--topology", "v5e:4x4", "--slices", "2", "--network", "1", "--logical", "2x2x1x1"], 4),
        (["--topology", "v5e:4x4", "--logical", "4x4x1x1"], None),
    ],
)
def test_groups_of_a_search_are_of_replicas(model, capsys, faked, devices, groups) -> None:
    asked = faked(KeyboardInterrupt())
    assert main(["plan", "model.py", "--chip", "chip.json", *devices, "--search", "width=32", "microbatches=1"]) == 130
    placements = [words[words.index("--strategy") + 1] for words in asked]
    assert placements == ["mirrored"] + (["sharded", f"groups:{groups}"] if groups else [])


def test_each_case_has_the_options_of_the_search(model, faked) -> None:
    """As the command itself reads them."""
    options = ["--topology", "v5e:4x4", "--slices", "2", "--network", "12.3456789", "--logical", "1x2x1x1"]
    options += ["--batch", "64", "--chip", "chip.json", "--with", "width=32"]
    asked = faked(KeyboardInterrupt())
    assert main(["plan", "model.py", *options, "--search", "strategy=mirrored,sharded", "microbatches=1"]) == 130
    parser = argparse.ArgumentParser()
    plan.add_parser(parser.add_subparsers())
    given = vars(parser.parse_args(["plan", "model.py", *options]))
    assert len(asked) == 2
    for words, strategy in zip(asked, ("mirrored", "sharded"), strict=True):
        found = vars(parser.parse_args(["plan", *words]))
        assert found == {**given, "strategy": strategy, "microbatches": 1}


def test_groups_of_a_search_divide_the_replicas() -> None:
    for replicas, slices in itertools.product(range(1, 65), repeat=2):
        if replicas % slices:
            continue
        found = choices.default_choices(replicas, slices)["strategy"]
        assert found[:1] == ["mirrored"]
        assert ("sharded" in found) == (replicas > 1)
        for size in (int(text.removeprefix("groups:")) for text in found[2:]):
            assert 1 < size < replicas
            assert replicas % size == 0
            assert slices in (1, replicas // size)


def test_cases_have_the_same_examples_on_all_devices() -> None:
    element = {"x": jax.ShapeDtypeStruct((8, 3), "float32"), "scale": 2.0}
    for logical, parts in itertools.product((1, 2, 4), (1, 2, 4)):
        strategy = strategy_of(devices=8, logical=logical, microbatches=parts)
        for batch in (None, 32):
            args = argparse.Namespace(batch=batch, microbatches=parts, case=pathlib.Path("case"))
            found = plan._with_batch(element, strategy, args)
            assert found["x"].shape[0] * strategy.num_replicas_in_sync == (8 * 8 if batch is None else batch)
            assert found["scale"] == 2.0
        assert plan._with_batch(2.0, strategy, argparse.Namespace(batch=None, microbatches=2, case=None)) == 2.0


def test_a_case_tells_its_examples_if_its_arrays_agree_in_them(model, monkeypatch) -> None:
    monkeypatch.setattr(plan, "end_with_search", lambda: None)  # standard input is that of the tests
    command = ["plan", "model.py", "--replicas", "8", "--chip", "chip.json", "--case", "case.json"]

    def case(*options: str) -> dict:
        status = main([*command, *options])
        data = json.loads((model.parent / "case.json").read_text())
        assert status == (0 if data["fits"] else 1)
        return {name: data.get(name) for name in ("fits", "is_pruned", "examples", "replicas")}

    assert case() == {"fits": True, "is_pruned": None, "examples": 8 * 16, "replicas": 8}
    large = {"fits": False, "is_pruned": True, "examples": 8 * 256, "replicas": 8}
    assert case("--with", "width=256") == large
    model.write_text(model.read_text().replace("def step(x):", "def step(both):\n        x, mask = both"))
    more = 'return step, (jax.ShapeDtypeStruct((width, width), "float32"), jax.ShapeDtypeStruct((3,), "float32"))'
    model.write_text(re.sub("return step, .*", more, model.read_text()))
    assert case() == {"fits": True, "is_pruned": None, "examples": None, "replicas": 8}
    assert case("--with", "width=256") == {**large, "examples": None}


def test_values_of_python_are_what_with_reads(model, capsys, faked) -> None:
    model.write_text(model.read_text().replace("[32, 64]", "[None, 'wide', '1', (2, 3), 0.5]"))
    asked = faked(KeyboardInterrupt())
    assert main(["plan", "model.py", "--chip", "chip.json", "--search", "strategy=mirrored", "microbatches=1"]) == 130
    assert [words[-3] for words in asked] == [f"width={v}" for v in ("None", "wide", "'1'", "(2, 3)", "0.5")]


# --- processes ------------------------------------------------------------------------------------------

PLAYED = """
import json, os, signal, subprocess, sys, time
what, path = sys.argv[1], sys.argv[-1]
if what == "writes":
    memory = {"total": 1, "capacity": None}
    open(path, "w").write(json.dumps({"fits": None, "memory": memory, "examples": 3, "replicas": 1}))
elif what == "fails":
    sys.exit("Traceback\\nreplicax plan: error: it is wrong")
elif what == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
elif what == "silent":
    sys.exit(7)
elif what == "half":
    open(path, "w").write("{")
    sys.exit(1)
elif what == "hangs":
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    open(os.path.dirname(path) + ".child", "w").write(f"{os.getpid()} {child.pid}")
    time.sleep(600)
"""


def is_running(process: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.fixture
def played(monkeypatch, tmp_path):
    """Processes that do at once what a plan may do in the end."""
    monkeypatch.setattr(case_processes, "_COMMAND", [sys.executable, "-S", "-c", PLAYED])
    names = ["writes", "fails", "dies", "silent", "half", "hangs"]
    return {name: case(name) for name in names}, (lambda case: [case.values[0][1]]), tmp_path


def wait_for_ends(processes: list[int]) -> None:
    """A process that is killed takes a moment to end."""
    deadline = time.monotonic() + 60
    while any(map(is_running, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children_of(folder, count: int) -> list[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        texts = [path.read_text().split() for path in folder.glob("*.child")]
        if len(texts) == count and all(len(text) == 2 for text in texts):
            return [int(word) for text in texts for word in text]
        time.sleep(0.02)
    raise AssertionError(f"{count} processes should have started")


@pytest.mark.parametrize("jobs", [1, 3, 9])
def test_what_becomes_of_processes(played, jobs) -> None:
    cases, arguments, folder = played
    results = {
        str(outcome.case): (outcome.state, outcome.reason)
        for outcome in outcomes([c for name, c in cases.items() if name != "hangs"], arguments, jobs, 600, folder)
    }
    memory = "perhaps the machine had too little memory"
    assert results == {
        "writes": ("fits", ""),
        "fails": ("failed", "it is wrong"),
        "dies": ("failed", f"its process was ended by SIGKILL: {memory}; try fewer --jobs"),
        "silent": ("failed", "exit status 7"),
        "half": ("failed", "exit status 1"),
    }


def test_a_case_that_takes_too_long_is_ended_with_all_that_it_started(played) -> None:
    cases, arguments, folder = played
    [late] = outcomes([cases["hangs"]], arguments, 2, 1.0, folder)
    assert (late.state, late.reason) == ("failed", "not planned within 1 s (--deadline)")
    wait_for_ends(children_of(folder, 1))
    (other := folder / "other").mkdir()
    found = outcomes([cases["writes"], cases["hangs"]], arguments, 2, 600.0, other)
    assert next(found).case == cases["writes"]
    processes = children_of(other, 1)
    found.close()  # as by an interrupt
    wait_for_ends(processes)


def test_cases_end_with_a_search_that_is_killed(tmp_path) -> None:
    """SIGKILL can't be caught: the kernel closes the pipe that each case reads."""
    waits = "import sys, time; from replicax.cli.search.case_processes import end_with_search; end_with_search()"
    script = f"""
        import sys
        from pathlib import Path
        from replicax.cli.search import case_processes
        from replicax.cli.search.choices import SearchCase
        waits = {waits!r} + "; open(sys.argv[-1] + '.pid', 'w').write(str(__import__('os').getpid())); time.sleep(600)"
        case_processes._COMMAND = [sys.executable, "-c", waits]
        list(case_processes.outcomes([SearchCase(())], lambda case: [], 1, 600.0, Path({str(tmp_path)!r})))
    """
    search = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    try:
        file, deadline = tmp_path / "0" / "found.json.pid", time.monotonic() + 60
        while not (file.exists() and file.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        child = int(file.read_text())
    finally:
        search.kill()
        search.wait()
    wait_for_ends([child])


def test_examples_in_docstrings() -> None:
    found = doctest.testmod(choices)
    assert found.attempted > 3
    assert found.failed == 0
