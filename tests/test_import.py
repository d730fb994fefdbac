from __future__ import annotations

import ast
import importlib
import pathlib
import subprocess
import sys

import pytest

import replicax

HEAVY = [
    "grain",
    "matplotlib",
    "rich",
    "sklearn",
    "flax",
    "equinox",
    "torch",
    "tensorflow",
    "datasets",
    "pyarrow",
    "orbax",
    "tensorstore",
]


def test_every_name_and_room_is_found_and_heavy_packages_are_loaded_when_used() -> None:
    """In a process in which nothing else has loaded them, in any order."""
    code = f"""
import sys, replicax
replicax.values.regroup, replicax.errors.LocalityError
print(replicax.has_strategy())
for name in sorted(replicax.__all__, reverse=True):
    getattr(replicax, name)
import replicax.launcher
from replicax import *
from replicax.compat.v1 import *
print([m for m in {HEAVY} if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False", "[]"]


def test_what_needs_no_jax_loads_none() -> None:
    code = "import sys, replicax, replicax.cli; replicax.EXIT_PREEMPTED; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "False"


def test_each_public_name_is_declared_listed_and_loaded_alike() -> None:
    """The package has its names three times: for types, for ``import *``, and where they are loaded from."""
    tree = ast.parse(pathlib.Path(replicax.__file__).read_text())
    [typed] = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    declared = {a.name: n.module for n in typed.body if isinstance(n, ast.ImportFrom) for a in n.names}
    for package in ("cluster", "data", "errors", "loop", "models", "parameter_server", "planning", "variables"):
        assert declared.pop(package) == "replicax"
    assert declared == replicax._LATER
    assert set(replicax.__all__) == {*declared, "EXIT_PREEMPTED"}


def test_completion_lists_public_names_and_packages_alone() -> None:
    listed = {name for name in dir(replicax) if not name.startswith("_")}
    packages = {"cluster", "data", "errors", "loop", "models", "parameter_server", "planning", "variables"}
    assert listed == {*replicax.__all__, *packages}


def test_names_that_have_moved_are_still_found_with_a_warning() -> None:
    assert len(replicax.__all__) <= 70
    for name, module in replicax._MOVED.items():
        package = importlib.import_module(module)
        assert name in package.__all__
        with pytest.warns(DeprecationWarning, match=f"^replicax.{name} is now {module}.{name}$"):
            assert getattr(replicax, name) is getattr(package, name)
        assert name not in dir(replicax)


WITHOUT_MATPLOTLIB = """
import sys

sys.modules["matplotlib"] = None  # as if it were not installed
import replicax
from replicax.cli import main

print("exit", main(["plan", "doubled.py", "--html", "plan.html"]), main(["plan", "doubled.py"]))
plan = replicax.plan(replicax.MirroredStrategy(["cpu:0"]), lambda: None)
for draw in (plan.write_html, replicax.Topology.from_name("v5e:2x2").plot):
    try:
        draw("plan.svg")
    except ImportError as error:
        print(error, file=sys.stderr)
print(plan._repr_html_()[:5])
"""


def test_matplotlib_is_needed_only_for_pictures(tmp_path: pathlib.Path) -> None:
    (tmp_path / "doubled.py").write_text("def plan(strategy):\n    return lambda x: 2 * x, 1.0\n")
    program = [sys.executable, "-c", WITHOUT_MATPLOTLIB]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    names = ["replicax plan: error: --html", "Plan.write_html", "Topology.plot"]
    assert done.stderr.splitlines() == [
        f"{name} needs the package matplotlib, which is not installed: pip install 'replicax[pictures]'"
        for name in names
    ]
    assert done.stdout.splitlines()[-1] == "<p><b"
    assert "exit 2 0" in done.stdout
