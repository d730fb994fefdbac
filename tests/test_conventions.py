"""The rules of CONTRIBUTING.md for folders and names, and that its recipes are enough."""

from __future__ import annotations

import ast
import collections
import functools
import pathlib
import re

import jax
import numpy as np
import pytest

import replicax

SOURCES = pathlib.Path(replicax.__file__).parent
MODULES = sorted(SOURCES.rglob("*.py"))


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_folders_are_small() -> None:
    folders = collections.Counter(path.parent for path in MODULES)
    assert {folder: count for folder, count in folders.items() if count > 14} == {}


@pytest.mark.parametrize("is_compatibility", [False, True])
def test_public_classes_have_names_of_their_own(is_compatibility: bool) -> None:
    """A compatibility package repeats the names of the original, and so some of ours; that is what it is for."""
    paths = [path for path in MODULES if ("compat" in path.relative_to(SOURCES).parts) == is_compatibility]
    trees = [parsed(path) for path in paths]
    classes = collections.Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, count in classes.items() if count > 1 and not name.startswith("_")] == []


def test_every_file_says_what_it_is() -> None:
    missing = [path.name for path in MODULES if not ast.get_docstring(parsed(path))]
    assert missing == []


def test_no_package_is_imported_by_its_name_as_a_string() -> None:
    """``make lint`` can't see such an import: what lower packages use of upper ones is in ``system/registry.py``."""
    allowed = {
        "__init__.py": "the lazy imports",
        "cli/demo.py": "the examples",
        "cli/user_function.py": "a user's module",
    }
    allowed |= {"parameter_server/actors.py": "Ray's own", "gpu/cuda_compiler.py": "JAX's plugins"}
    found = {path.relative_to(SOURCES).as_posix() for path in MODULES if "import_module(" in path.read_text()}
    assert found - allowed.keys() == set()


def test_files_are_no_longer_than_their_subject() -> None:
    lengths = {path.relative_to(SOURCES).as_posix(): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: length for name, length in lengths.items() if length > 600} == {}


# --- the recipes ----------------------------------------------------------------------------------------


class BackwardsStrategy(replicax.Strategy):
    """A strategy of one's own: replicas on the devices in the opposite order."""

    def __init__(self, count: int) -> None:
        super().__init__(replicax.StrategyExtended(jax.devices()[:count][::-1]))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_strategy_is_a_short_class(count: int) -> None:
    strategy = BackwardsStrategy(count)
    data = np.arange(12, dtype=np.float32).reshape(4, 3)
    with strategy.scope():
        w = replicax.Variable(np.ones(3, np.float32))

    def step(x: jax.Array) -> None:
        total = replicax.get_replica_context().all_reduce("sum", (x * w.value[None]).sum(0))
        w.assign(w + total)

    batch = next(iter(strategy.distribute_dataset([data])))
    strategy.run(step, args=(batch,))
    with replicax.debug():
        strategy.run(step, args=(batch,))
    expected = np.ones(3, np.float32)
    for _ in range(2):
        expected = expected + (data * expected).sum(0)
    np.testing.assert_allclose(w.numpy(), expected)
    assert list(strategy.extended.worker_devices) == jax.devices()[:count][::-1]


def test_a_strategy_of_several_choices_is_a_file_of_30_lines() -> None:
    """The page runs it; and those of ours that only choose have no more code than that."""
    page = (SOURCES.parents[1] / "docs" / "placement.md").read_text()
    [own] = re.findall(r"^```python\n(class .*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert "GroupPartitioner" in own
    assert "StrategyExtended" in own
    assert len(own.splitlines()) <= 30
    for name in ("one_device", "mirrored", "central_storage", "sharded", "default"):
        tree = ast.parse((SOURCES / "strategies" / f"{name}.py").read_text())
        [strategy] = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        code = [
            statement
            for function in strategy.body
            if isinstance(function, ast.FunctionDef)
            for statement in function.body
        ]
        assert sum(s.end_lineno - s.lineno + 1 for s in code) <= 30, name


def test_a_chip_is_a_value() -> None:
    chip = replicax.planning.Chip("abacus", flops=1e3, memory=1e6, bandwidth=1e3)
    strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    found = replicax.plan(strategy, lambda: jax.numpy.ones(3), chip=chip)
    assert found.chip.name == "abacus"


# --- locked versions ------------------------------------------------------------------------------------

ROOT = SOURCES.parent.parent


def locked(path: pathlib.Path) -> dict[str, str]:
    lines = [line.split("#")[0].split(";")[0].strip() for line in path.read_text().splitlines()]
    pairs = [line.split("==") for line in lines if "==" in line]
    return {re.sub("[-_.]+", "-", name).lower(): version for name, version in pairs}


@pytest.mark.parametrize("folder", ["docs/site", "tests/gpu", "tests/integration", "tests/oracle", "benchmarks/peers"])
def test_constraints_do_not_contradict_each_other(folder: str) -> None:
    """An environment that takes both files could not be installed."""
    common, special = locked(ROOT / "constraints.txt"), locked(ROOT / folder / "constraints.txt")
    assert special
    assert {
        name: (common[name], special[name]) for name in common.keys() & special if common[name] != special[name]
    } == {}
