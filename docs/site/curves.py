"""Measure the curves of the gallery's pictures: ``python docs/site/curves.py [program …]`` writes ``curves.json``.

Each program's ``main`` is run on one device and on four replicas, and its losses are kept: of so many steps, or of the
epochs that it has. Dropout is off, as each replica draws its own. Programs that are named are measured anew, the others
stay as they are; without names, all of them are measured. It takes Flax, Equinox, Keras and scikit-learn, as in the
environment of ``make docs``.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from gallery import CURVES, known_curves, programs_of
from pages import ROOT

import replicax

STEPS = 120
DIGITS = 4  # of a loss
_QUIET = {"dropout": 0.0, "verbose": 0}  # where a program has them


def main() -> None:
    """The command."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    sys.path.insert(0, str(ROOT))
    replicax.use_cpu_devices(4)
    examples = ROOT / "examples"
    found = {path.relative_to(examples).as_posix(): path for group in programs_of(examples).values() for path in group}
    if unknown := sorted(set(sys.argv[1:]) - set(found)):
        sys.exit(f"expected programs such as {min(found)}, got {', '.join(unknown)}")
    curves = {name: known for name, known in known_curves().items() if name in found}
    for name, path in found.items():
        if path.parent == examples or (sys.argv[1:] and name not in sys.argv[1:]):
            continue
        program = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        by, options = length_of(program.main)
        losses = {
            "one device": losses_of(program.main(replicax.OneDeviceStrategy("cpu:0"), **options)),
            "4 replicas": losses_of(program.main(replicax.MirroredStrategy(), **options)),
        }
        curves[name] = {"by": by, "losses": losses}
        print(f"{name}: {losses['one device'][0]} to {losses['one device'][-1]}", flush=True)
        lines = [f"  {json.dumps(known)}: {json.dumps(curves[known])}" for known in sorted(curves)]
        CURVES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def length_of(program: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """What a program counts, "step" or "epoch", and what it is called with beside the strategy."""
    names = inspect.signature(program).parameters
    options = {name: value for name, value in _QUIET.items() if name in names}
    return ("epoch", options) if "epochs" in names else ("step", {"steps": STEPS, **options})


def losses_of(result: list[float] | tuple[list[float], ...]) -> list[float]:
    """What a program returns begins with its losses, if there is more."""
    losses = result[0] if isinstance(result, tuple) else result
    return [round(float(loss), DIGITS) for loss in losses]


if __name__ == "__main__":
    main()
