"""Every Python block of the README and the documents runs, top to bottom, as a reader would run it."""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import pathlib
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator

import pytest

import replicax.errors
from replicax.parameter_server import coordinator as coordinator_module
from tests.conftest import as_readers_have_it
from tests.parameter_server.thread_actors import ThreadActors
from tests.public_names import PUBLIC

ROOT = pathlib.Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages on a package that `make docs` and `make keras` install; without it only their links are looked at.
FOREIGN = {"keras.md", "from_keras.md"}
EXECUTED = [path for path in DOCUMENTS if path.name not in FOREIGN or importlib.util.find_spec("keras")]
APART = {"recipes.md"}  # the programs of its sections have nothing to do with each other
# What `make test` leaves to `make soak`, as tests of a package or other pages have the same.
SOAK = {
    "docs/models.md",
    "docs/pipeline.md",
    "docs/placement.md",
    "docs/plan.md",
    "docs/random_numbers.md",
    "docs/from_pmap.md",
    "docs/from_pytorch.md",
    "docs/tutorials/from_equinox.md",
    "docs/tutorials/from_nnx.md",
    "docs/tutorials/planning_for_a_pod.md",
    "docs/tutorials/several_machines.md",
    *(
        f"docs/recipes.md: {heading}"
        for heading in (
            "Learning-rate schedules", "EMA: averaged weights", "Frozen layers", "Several optimizers",
            "Evaluation in Flax NNX", "Random seed", "Metric learning over replicas", "Mixed precision", "Profiling",
            "Clipping each example's gradient (DP-SGD)",
        )
    ),
}  # fmt: skip
HEADING = re.compile(r"^## (.*)$", re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def programs() -> Iterator[object]:
    """Pages, or sections of a page: where they begin and end, and what they are called."""
    for path in EXECUTED:
        text = path.read_text()
        headings = [match for match in HEADING.finditer(text) if path.name in APART]
        names = [f"{name_of(path)}: {match[1]}" for match in headings] or [name_of(path)]
        starts = [match.start() for match in headings] or [0]
        for name, start, end in zip(names, starts, [*starts[1:], len(text)], strict=True):
            marks = [pytest.mark.soak] if name in SOAK else []
            yield pytest.param(path, start, end, id=name, marks=marks)


@pytest.mark.parametrize(("path", "start", "end"), list(programs()))
def test_examples(path: pathlib.Path, start: int, end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "_make_actors", ThreadActors)  # tests/parameter_server starts processes
    run_examples(path, start, end)


@pytest.mark.soak
def test_the_page_on_parameter_servers_with_processes() -> None:
    run_examples(ROOT / "docs" / "parameter_server.md")


def run_examples(path: pathlib.Path, start: int = 0, end: int = sys.maxsize) -> None:
    namespace: dict[str, object] = {"__name__": path.stem}
    text = path.read_text()
    # What a page writes is not left behind.
    with as_readers_have_it(), tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for match in BLOCK.finditer(text, start, end):
            block, line = match[1], text.count("\n", 0, match.start(1))
            if ">>>" in block:
                test = doctest.DocTestParser().get_doctest(block, namespace, path.name, str(path), 0)
                runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
                runner.run(test, clear_globs=False)
                assert runner.failures == 0, block
                namespace = test.globs
            else:
                exec(compile("\n" * line + block, str(path), "exec"), namespace)  # lines are those of the page


def test_links_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            assert target.startswith("http") or (path.parent / target).exists(), (path, target)


def test_the_code_of_a_page_makes_the_devices_that_it_names() -> None:
    """The tests have eight devices, and a reader's machine has one."""
    for path in DOCUMENTS:
        before, _, _ = "".join(BLOCK.findall(path.read_text())).partition("replicax.use_cpu_devices(")
        assert not re.search(r"cpu:[1-9]", before.partition("(emulate=")[0], re.IGNORECASE), path


def test_the_page_on_installing_has_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = (ROOT / "docs" / "install.md").read_text()
    assert extras.keys() - {"dev"} == set(re.findall(r"`replicax\[([\w-]+)\]`", text))


def test_the_reference_lists_every_public_name() -> None:
    listed = set(re.findall(r"`([\w.]+)`", (ROOT / "docs" / "reference.md").read_text()))
    assert {name.removeprefix("replicax.") if name.count(".") == 1 else name for name in PUBLIC} <= listed


def test_the_page_on_troubleshooting_has_every_error_and_warning() -> None:
    named = {name for name, value in vars(replicax.errors).items() if isinstance(value, type)}
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert {name for name in named if name.endswith(("Error", "Warning"))} <= set(headings)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
