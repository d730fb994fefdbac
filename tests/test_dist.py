"""What ``make dist`` says of wheels and sdists with wrong contents, and what the page of the package shows."""

from __future__ import annotations

import pathlib
import re
import tomllib

import pytest

from tests.matrix import dist

ROOT = pathlib.Path(dist.__file__).parents[2]


@pytest.fixture
def checkout(tmp_path):
    for name in ("src/replicax/__init__.py", "examples/digits.py", "examples/gallery/nnx/cnn.py", "tests/test_x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    return tmp_path


WHEEL = [
    "replicax/__init__.py",
    "replicax/py.typed",
    "replicax/_examples/digits.py",
    "replicax/_examples/gallery/nnx/cnn.py",
    "replicax-0.1.0.dist-info/METADATA",
    "replicax-0.1.0.dist-info/licenses/LICENSE",
]


def test_a_right_wheel(checkout) -> None:
    assert dist.wrong_in_wheel(WHEEL, checkout) == []


@pytest.mark.parametrize(
    "missing", ["replicax/__init__.py", "replicax/py.typed", "replicax/_examples/gallery/nnx/cnn.py"]
)
def test_a_wheel_without_a_file(checkout, missing) -> None:
    names = [name for name in WHEEL if name != missing]
    assert dist.wrong_in_wheel(names, checkout) == [f"the wheel has no {missing}"]


@pytest.mark.parametrize("extra", ["tests/test_x.py", "replicax/left_over.py", "replicax/_examples/x.pyc"])
def test_a_wheel_with_what_does_not_belong_there(checkout, extra) -> None:
    assert dist.wrong_in_wheel([*WHEEL, extra], checkout) == [f"the wheel has {extra}"]


def test_an_sdist_without_its_tests_or_with_an_environment(checkout) -> None:
    names = ["pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt"]
    names += ["src/replicax/__init__.py", "tests/test_x.py"]
    assert dist.wrong_in_sdist(names, checkout) == []
    assert dist.wrong_in_sdist(names[:-1], checkout) == ["the sdist has no tests/test_x.py"]
    assert dist.wrong_in_sdist([*names, ".venv/bin/python"], checkout) == ["the sdist has .venv/bin/python"]


def test_the_page_of_the_package_has_no_link_that_leads_nowhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    [rule] = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    text = re.sub(rule["pattern"], rule["replacement"], (ROOT / "README.md").read_text())
    assert "- docs/semantics.md: the rules" in text
    assert "zip(grads, [w, b])" in text  # code is as it was
    assert all(target.startswith("http") for target in re.findall(r"\]\(([^)]+)\)", text))
