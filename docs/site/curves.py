"""Measure the curves of the gallery's pictures: ``python docs/site/curves.py [program …]`` writes ``curves.json``.

Each program's ``main(strategy, steps)`` is run on one device and on four replicas, and its losses are kept. Programs
that are named are measured anew, the others stay as they are; without names, all of them are measured. Those of Keras
have losses of epochs only, and no curve.
"""

from __future__ import annotations

import importlib
import json
import sys

from gallery import CURVES, known_curves, programs_of
from pages import ROOT

import replicax

STEPS = 40
DIGITS = 4  # of a loss


def main() -> None:
    """The command."""
    sys.path.insert(0, str(ROOT))
    replicax.use_cpu_devices(4)
    examples = ROOT / "examples"
    found = {path.relative_to(examples).as_posix(): path for group in programs_of(examples).values() for path in group}
    curves = {name: known for name, known in known_curves().items() if name in found}
    for name, path in found.items():
        if path.parent in (examples, examples / "gallery" / "keras") or (sys.argv[1:] and name not in sys.argv[1:]):
            continue
        program = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        curves[name] = {
            "one device": losses_of(program.main(replicax.OneDeviceStrategy("cpu:0"), steps=STEPS)),
            "4 replicas": losses_of(program.main(replicax.MirroredStrategy(), steps=STEPS)),
        }
        print(f"{name}: {curves[name]['one device'][0]} to {curves[name]['one device'][-1]}", flush=True)
        lines = [f"  {json.dumps(known)}: {json.dumps(curves[known])}" for known in sorted(curves)]
        CURVES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def losses_of(result: list[float] | tuple[list[float], ...]) -> list[float]:
    """What a program returns begins with its losses, if there is more."""
    losses = result[0] if isinstance(result, tuple) else result
    return [round(float(loss), DIGITS) for loss in losses]


if __name__ == "__main__":
    main()
