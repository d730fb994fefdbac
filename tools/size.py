"""Print how large the project is, and how far a step's parts travel through it.

    python tools/size.py

First the lines and files of each package of ``src/replicax``. Then the files that import one another in a circle, the
statements that import internals of JAX, and the public names. Last, for four things that a program does: how many
files of Replicax it passes, in how many visits (a call from another file begins one), and how many of these visits
climb to a package above. The order of packages is the one that import-linter checks (``pyproject.toml``).
"""

from __future__ import annotations

import ast
import collections
import itertools
import os
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "replicax"
CORE = ("_jax", "execution", "variables", "devices", "training", "strategies", "strategy.py", "context.py")
"""What a step passes through."""


def lines(path: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in ([path] if path.is_file() else path.rglob("*.py")))


def packages() -> Iterator[tuple[str, int, int]]:
    """The name, lines and files of each package, the largest first; the files beside them are one."""
    found = [(p.name, lines(p), len(list(p.rglob("*.py")))) for p in SOURCES.iterdir() if (p / "__init__.py").exists()]
    found.append(("*.py", sum(map(lines, SOURCES.glob("*.py"))), len(list(SOURCES.glob("*.py")))))
    yield from sorted(found, key=lambda package: -package[1])


def imports_of_internals() -> int:
    """How many statements import ``jax._src`` or ``jaxlib``."""
    count = 0
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            count += any(name.startswith(("jax._src", "jaxlib")) for name in names)
    return count


def circles() -> list[set[str]]:
    """The sets of files of which each imports, through others, each."""
    import grimp

    graph = grimp.build_graph("replicax", exclude_type_checking_imports=True)
    below = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    reached: dict[str, set[str]] = {}
    for start in below:
        seen, todo = set(), [start]
        while todo:
            for module in below[todo.pop()] - seen:
                seen.add(module)
                todo.append(module)
        reached[start] = seen
    found: list[set[str]] = []
    for module, seen in reached.items():
        circle = {other for other in seen if module in reached[other]}
        if circle and circle not in found:
            found.append(circle)
    return sorted(found, key=len, reverse=True)


def heights() -> Callable[[str], tuple[int, ...]]:
    """A function that tells how high a file is in the layers of the project, and of its package."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    levels: dict[str, int] = {}
    for contract in contracts:
        if contract["type"] == "layers":
            for level, layer in enumerate(reversed(contract["layers"])):
                levels.update({f"{contract['containers'][0]}.{name.strip()}": level for name in layer.split("|")})

    def height(file: str) -> tuple[int, ...]:
        parts = ["replicax", *file.removesuffix(".py").split("/")]
        return tuple(levels.get(".".join(parts[:n]), 0) for n in (2, 3))

    return height


def journey(action: Callable[[], Any]) -> tuple[int, int, int]:
    """Visits, files and climbs of an action."""
    visits = [""]

    def on_call(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(f"{SOURCES}/"):
            file = name.removeprefix(f"{SOURCES}/")
            if file != visits[-1]:
                visits.append(file)

    sys.setprofile(on_call)
    try:
        action()
    finally:
        sys.setprofile(None)
    height = heights()
    climbs = sum(height(to) > height(start) for start, to in itertools.pairwise(visits[1:]))
    return len(visits) - 1, len(set(visits)) - 1, climbs


def journeys() -> Iterator[tuple[str, tuple[int, int, int]]]:
    import jax.numpy as jnp
    import numpy as np

    import replicax

    replicax.use_cpu_devices(2)
    strategy = replicax.MirroredStrategy()
    batches = [np.ones((4, 2), np.float32)] * 6
    iterator = iter(strategy.distribute_dataset(batches, replicax.InputOptions(prefetch=0)))
    with strategy.scope():
        weights = replicax.Variable(jnp.zeros(2))

    def step(x: Any) -> Any:
        return replicax.value_and_grad(lambda: replicax.compute_average_loss(x @ weights.value), [weights])()[0]

    for _ in range(3):
        batch = next(iterator)
        strategy.run(step, args=(batch,))
    yield "a batch", journey(lambda: next(iterator))
    yield "a write", journey(lambda: weights.assign(jnp.ones(2)))
    yield "a known step", journey(lambda: strategy.run(step, args=(batch,)))
    yield "a new step, traced and compiled", journey(lambda: strategy.run(lambda x: step(x), args=(batch,)))


def main() -> None:
    total = 0
    for name, count, files in packages():
        total += count
        print(f"{name:20}{count:7,} lines {files:4} files")
    print(f"{'src/replicax':20}{total:7,} lines")
    print(f"{'of it the core':20}{sum(lines(SOURCES / name) for name in CORE):7,} lines ({', '.join(CORE)})")
    for place in ("packages", "tests", "benchmarks", "examples"):
        print(f"{place:20}{lines(ROOT / place):7,} lines")
    import replicax

    found = circles()
    print(f"circles of imports: {len(found)}, of {', '.join(str(len(c)) for c in found) or 'no'} files")
    print(f"statements that import internals of JAX: {imports_of_internals()}")
    print(f"public names of the package: {len(replicax.__all__)}")
    widest = collections.Counter(path.parent for path in SOURCES.rglob("*.py")).most_common(1)[0]
    print(f"most files in a folder: {widest[1]} ({widest[0].relative_to(SOURCES)})")
    for what, (visits, files, climbs) in journeys():
        print(f"{what}: {visits} visits of {files} files, {climbs} climbs")


if __name__ == "__main__":
    main()
