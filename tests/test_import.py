from __future__ import annotations

import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("module", ["replicax", "replicax.compat.v1"])
def test_heavy_packages_are_loaded_when_used(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
