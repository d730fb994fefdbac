from __future__ import annotations

import subprocess
import sys

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
]


def test_heavy_packages_are_loaded_when_used() -> None:
    code = f"import sys, replicax; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
