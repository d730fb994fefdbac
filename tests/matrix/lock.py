"""Write the lock anew: what pip chooses today on each Python, as lines for ``constraints.txt``.

``python3 tests/matrix/lock.py 3.11 3.12 3.13`` makes an environment with each Python, and prints one lock for all:
where they differ, lines have markers. With ``--jax 0.11.2`` it prints what another JAX needs beside that,
for ``tests/matrix/jax-0.11.2.txt``.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from tests.matrix.run import MIGRATE, ROOT, interpreter, package, version_of

HEAD = """\
# Exact versions of everything that the development environment installs, and of what builds the package:
# Python {first} to {last}, Linux, CPU. Where a Python has a newer JAX (and so on) than the oldest, it gets that.
# Regenerate as CONTRIBUTING.md says.
"""
# What builds the package.
BUILD = ("hatchling", "hatch-fancy-pypi-readme")
# What goes with a JAX, and with no other.
OF_JAX = {"flax", "jax", "jaxlib", "libtpu"}

Python = tuple[int, int]


def merged(frozen: Mapping[Python, str]) -> list[str]:
    """One lock of what ``pip freeze`` says on each Python, with markers where that differs."""
    pythons = sorted(frozen)
    lines_of: dict[str, dict[Python, str]] = {}
    for python in pythons:
        for line in frozen[python].splitlines():
            lines_of.setdefault(package(line), {})[python] = line
    lock = []
    for name in sorted(lines_of):
        lines = lines_of[name]
        distinct = list(dict.fromkeys(lines.values()))
        if len(distinct) == 1:
            lock += distinct
            continue
        for line in distinct:
            having = [python for python in pythons if lines.get(python) == line]
            lock.append(f"{line}; {_marker(having, pythons)}")
    return lock


def _marker(having: Sequence[Python], pythons: Sequence[Python]) -> str:
    first, last = having[0], having[-1]
    if list(having) != [p for p in pythons if first <= p <= last]:
        return " or ".join(f'python_version == "{_name(p)}"' for p in having)
    bounds = []
    if first != pythons[0]:
        bounds.append(f'python_version >= "{_name(first)}"')
    if last != pythons[-1]:
        bounds.append(f'python_version < "{_name(pythons[pythons.index(last) + 1])}"')
    return " and ".join(bounds)


def _name(python: Python) -> str:
    return f"{python[0]}.{python[1]}"


def frozen(python: str, requirements: Sequence[str], constraints: str) -> str:
    """What ``pip freeze`` says of a new environment for developers."""
    with tempfile.TemporaryDirectory() as folder:
        limits = pathlib.Path(folder) / "constraints.txt"
        limits.write_text(constraints)
        pip = [f"{folder}/env/bin/python", "-m", "pip"]
        settings = os.environ | {"PIP_CONSTRAINT": str(limits), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        install = [*pip, "install", "--editable", ".[dev]", "--editable", str(MIGRATE), *BUILD, *requirements]
        for command in ([python, "-m", "venv", f"{folder}/env"], install):
            subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr, env=settings)
        freeze = [*pip, "freeze", "--exclude-editable"]
        return subprocess.run(freeze, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """The command: Pythons, and perhaps a JAX."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+", help="versions, commands or paths")
    parser.add_argument("--jax", help="another JAX than that of constraints.txt")
    options = parser.parse_args()
    requirements, constraints = [], ""
    common = (ROOT / "constraints.txt").read_text()
    if options.jax:
        requirements = [f"jax=={options.jax}"]
        constraints = "\n".join(line for line in common.splitlines() if package(line) not in OF_JAX)
    found = {}
    for python in map(interpreter, options.pythons):
        found[version_of(python)] = frozen(python, requirements, constraints)
    lines = merged(found)
    if options.jax:
        print(f"# What differs from constraints.txt with JAX {options.jax}.")
        names = {package(line) for line in common.splitlines()} - OF_JAX
        print(*(line for line in lines if package(line) not in names), sep="\n")
    else:
        print(HEAD.format(first=_name(min(found)), last=_name(max(found))), end="")
        print(*lines, sep="\n")


if __name__ == "__main__":
    main()
