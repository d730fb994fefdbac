"""The gallery: each program has the losses of one device on four replicas."""

from __future__ import annotations

import ast
import importlib
import pathlib
import re
from typing import Any

import numpy as np
import pytest

import replicax
from tests.conftest import strategy_of
from tests.programs.programs import third_party
from tests.soaking import soak_except

PROGRAMS: dict[str, dict[str, Any]] = {
    "nnx.cnn": {"epochs": 3, "steps": 1, "dropout": 0.0},
    "nnx.gpt": {"steps": 3},
    "nnx.vit": {"steps": 3},
    "nnx.diffusion": {"steps": 3},
    "equinox.cnn": {"steps": 3},
    "equinox.rnn": {"steps": 3},
    "equinox.bert": {"steps": 3},
    "equinox.neural_ode": {"steps": 3},
    "linen.vae": {"steps": 3},
    "linen.resnet": {"steps": 3},
    "linen.seq2seq": {"steps": 3},
    "pytrees.two_tower": {"steps": 3},
}
"""How short each is here."""
QUICK = ("linen.vae",)
"""Those of `make test`; `make soak` has all, and tests/models, tests/corpus and tests/examples have others."""

GALLERY = pathlib.Path(__file__).parents[2] / "examples" / "gallery"
FILES = sorted(GALLERY.glob("*/*.py"))
OURS = re.compile(r"\breplicax\.\w|\bstrategy\.\w")
FOR_EVERYONE = re.compile(r"strategy\.distribute_dataset\(|=replicax\.REPLICA_AXIS|= replicax\.REPLICA_AXIS")


def losses(name: str, strategy: replicax.Strategy, **shorter: Any) -> list[float]:
    """What the program prints."""
    found = importlib.import_module(f"examples.gallery.{name}").main(strategy, **{**PROGRAMS[name], **shorter})
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("name", soak_except(PROGRAMS, *QUICK))
@third_party
def test_losses_are_those_of_one_device(name: str) -> None:
    expected = losses(name, strategy_of(1))
    assert len(expected) == 3
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(losses(name, strategy_of(4)), expected, rtol=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in PROGRAMS if "resnet" not in name])
@third_party
def test_it_learns(name: str) -> None:
    """In a few dozen steps, as the same on any number of replicas."""
    longer = {"epochs": 2, "steps": None} if name == "nnx.cnn" else {"steps": 60}
    found = losses(name, strategy_of(4), **longer)
    assert np.mean(found[-5:]) < 0.95 * np.mean(found[:5]) or found[-1] < found[0] / 2


def test_the_list_has_every_program() -> None:
    listed = re.findall(r"^\| \[(.+?)\]\(", (GALLERY / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == [path.relative_to(GALLERY).as_posix() for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_lines_that_are_changed_are_marked_and_counted(path: pathlib.Path) -> None:
    text = path.read_text()
    statements = [node for node in ast.parse(text).body[1:] if not isinstance(node, ast.If)]  # no docstring, no command
    lines = [text.splitlines()[number - 1] for node in statements for number in range(node.lineno, node.end_lineno + 1)]
    marked = [line for line in lines if "# Replicax" in line]
    assert [line for line in lines if OURS.search(line) and line not in marked and not FOR_EVERYONE.search(line)] == []
    name = path.relative_to(GALLERY).as_posix()
    [row] = [line for line in (GALLERY / "README.md").read_text().splitlines() if line.startswith(f"| [{name}]")]
    counted = row.split("|")[4].split(",")[0]
    assert len(marked) == int(counted)
    assert len([line for line in marked if ".all_gather(" not in line]) <= 2  # a loss over all examples gathers them
