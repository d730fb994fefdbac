"""Every example in a docstring runs and prints what it says; every public name has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pathlib
import pkgutil

import pytest

import replicax
from replicax.parameter_server import coordinator as coordinator_module
from tests.conftest import as_readers_have_it
from tests.parameter_server.thread_actors import ThreadActors
from tests.public_names import PUBLIC

# Modules on packages that only `make integrations` installs.
FOREIGN = {f"replicax.integrations.{name}" for name in ("hugging_face", "tf_data", "torch_data")}
MODULES = sorted(
    name
    for _, name, _ in pkgutil.walk_packages(replicax.__path__, "replicax.")
    if not name.startswith(("replicax.cli", "replicax.models.keras.")) and name not in FOREIGN
)


def source_of(name: str) -> str:
    path = pathlib.Path(replicax.__path__[0], *name.split(".")[1:])
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


@pytest.mark.parametrize("name", [name for name in ["replicax", *MODULES] if ">>>" in source_of(name)])
def test_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "_make_actors", ThreadActors)  # tests/parameter_server starts processes
    run_examples(name)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("replicax.parameter_server.")])
def test_examples_with_processes(name: str) -> None:
    run_examples(name)


def run_examples(name: str) -> None:
    with as_readers_have_it():
        result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def _documented(obj: object) -> bool:
    return bool(inspect.getdoc(obj))


def test_public_names_are_documented() -> None:
    for name in PUBLIC:
        obj = pkgutil.resolve_name(name)
        assert _documented(obj), name
        if inspect.isclass(obj) and obj.__module__.startswith("replicax"):
            for member, value in vars(obj).items():
                if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                    assert _documented(value), f"{name}.{member}"


def test_help_shows_what_public_names_take() -> None:
    for name in PUBLIC:
        obj = pkgutil.resolve_name(name)
        if callable(obj) and not (inspect.isclass(obj) and issubclass(obj, Exception)):
            assert str(inspect.signature(obj)) != "(*args, **kwargs)", name
    assert next(iter(inspect.signature(replicax.Variable).parameters)) == "initial_value"


def _examples_of(obj: object) -> str:
    texts = [inspect.getdoc(obj) or ""]
    if inspect.isclass(obj):
        texts += [inspect.getdoc(value) or "" for value in vars(obj).values() if callable(value)]
    return "\n".join(texts)


def test_public_names_have_an_example() -> None:
    for name in PUBLIC:
        obj = pkgutil.resolve_name(name)
        # The functions that raise errors show them; what a string is for, docs/semantics.md shows.
        if not (isinstance(obj, str) or (inspect.isclass(obj) and issubclass(obj, (Exception, Warning)))):
            assert ">>>" in _examples_of(obj), name
