"""The table of old names: all that it sends people to is there."""

from __future__ import annotations

import inspect
import re

import pytest

import replicax
from replicax import name_hints
from replicax_migrate.counterparts import public
from replicax_migrate.old_names import ARGUMENTS, NAMES

STRATEGY = replicax.OneDeviceStrategy("cpu:0")


@pytest.mark.parametrize("kind", NAMES)
def test_what_takes_their_place_is_there(kind: str) -> None:
    for name, today in NAMES[kind].items():
        for path in re.findall(r"\b(?:replicax|strategy)(?:\.\w+)+", today):
            first, *rest = path.split(".")
            owner = replicax if first == "replicax" else replicax.TPUStrategy if "TPU" in today else STRATEGY
            for attribute in rest:
                owner = getattr(owner, attribute)
        assert kind == "InputOptions" or not hasattr(replicax if kind == "replicax" else public(kind), name)


@pytest.mark.parametrize("path", ARGUMENTS)
def test_arguments_are_those_of_functions_that_take_what_is_said(path: str) -> None:
    kind, method = path.split(".")
    parameters = inspect.signature(getattr(public(kind), method)).parameters
    for name, today in ARGUMENTS[path].items():
        assert name not in parameters
        assert not today.isidentifier() or today in parameters


def test_what_the_core_has_is_here_too() -> None:
    assert all(name_hints.NAMES[kind].items() <= NAMES[kind].items() for kind in name_hints.NAMES)
    assert all(name_hints.ARGUMENTS[path].items() <= ARGUMENTS[path].items() for path in name_hints.ARGUMENTS)
