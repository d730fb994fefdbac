"""The distribution: it is of the same release as Replicax, and ``replicax`` finds its command."""

from __future__ import annotations

import importlib.metadata
import pathlib
import tomllib

import replicax
from replicax_migrate import command

FOLDER = pathlib.Path(__file__).parents[1]


def test_it_is_of_the_same_release() -> None:
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    assert project["version"] == replicax.__version__
    assert project["dependencies"] == [f"replicax=={replicax.__version__}"]
    assert (FOLDER / "LICENSE").read_text() == (FOLDER.parents[1] / "LICENSE").read_text()


def test_its_command_is_found() -> None:
    [entry] = importlib.metadata.entry_points(group="replicax.commands", name="migrate")
    assert entry.load() is command
