"""Run the tests with each JAX on each Python, in environments of their own: ``make matrix``.

The lock of a combination is that of the repository, ``constraints.txt``, in which the packages of another JAX replace
those with the same name: ``tests/matrix/jax-0.11.2.txt`` has them. A combination that fails hides no other; a table
at the end has them all, and their output lies beside their environments, in ``.venv-matrix``.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".venv-matrix"
# `replicax migrate`, a distribution of its own.
MIGRATE = ROOT / "packages" / "replicax-migrate"
LOCKS = {path.stem.removeprefix("jax-"): path for path in sorted((ROOT / "tests" / "matrix").glob("jax-*.txt"))}
# The first Python that a JAX can be installed on, by the JAX.
OLDEST_PYTHON = {"0.10": (3, 11), "0.11": (3, 12), "0.12": (3, 12)}
# Quick, and tells what to mend first; so it comes first.
FIRST = "tests/_jax/test_primitive_table.py"


@dataclasses.dataclass(frozen=True)
class Row:
    """What came of a combination.

    Attributes:
      python: the Python, as it was asked for.
      jax: the JAX.
      passed: how many tests passed; of all runs.
      failed: how many did not.
      seconds: how long the tests ran.
      trouble: why there are no tests, if there are none.
    """

    python: str
    jax: str
    passed: int = 0
    failed: int = 0
    seconds: float = 0.0
    trouble: str = ""

    @property
    def is_good(self) -> bool:
        """Whether all tests ran and passed."""
        return not self.trouble and not self.failed and self.passed > 0

    def cells(self) -> tuple[str, ...]:
        """The row in words."""
        if self.trouble:
            return self.python, self.jax, "failed", self.trouble, ""
        result = "passed" if self.is_good else "failed"
        minutes = f"{self.seconds / 60:.1f} min"
        return self.python, self.jax, result, f"{self.passed} passed, {self.failed} failed", minutes


class UnusableError(Exception):
    """A combination can't be run."""


def supports(jax: str, python: tuple[int, int]) -> bool:
    """Whether a JAX can be installed on a Python."""
    series = ".".join(jax.split(".")[:2])
    return python >= OLDEST_PYTHON.get(series, (3, 11))


def interpreter(name: str) -> str:
    """The path of a Python that is named by a version (``3.12``), a command or a path.

    Raises:
      UnusableError: there is none that runs.
    """
    candidates = [name] if not name[0].isdigit() else [f"python{name}"]
    found = shutil.which(candidates[0])
    if found and _runs(found):
        return found
    if name[0].isdigit() and shutil.which("pyenv"):  # which may have it without offering it as a command
        installed = _output("pyenv", "versions", "--bare").split()
        matching = [v for v in installed if re.fullmatch(re.escape(name) + r"(\.\d+)?", v)]
        for version in sorted(matching, key=lambda v: [int(part) for part in v.split(".")], reverse=True):
            found = str(pathlib.Path(_output("pyenv", "prefix", version).strip()) / "bin" / "python")
            if _runs(found):
                return found
    raise UnusableError(f"no Python {name} found: name its interpreter, as in make matrix PYTHONS=/path/to/python")


def _runs(python: str) -> bool:
    try:
        return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def version_of(python: str) -> tuple[int, int]:
    """Major and minor version of an interpreter."""
    major, minor = _output(python, "-c", "import sys; print(*sys.version_info[:2])").split()
    return int(major), int(minor)


def lock(common: str, replacing: str) -> str:
    """The lines of ``common``, without those packages that ``replacing`` has lines for, and the lines of that."""
    names = set(filter(None, map(package, replacing.splitlines())))
    kept = [line for line in common.splitlines() if package(line) not in names]
    return "\n".join([*kept, *replacing.splitlines()]) + "\n"


def package(line: str) -> str:
    """The package that a line of a lock is about; empty for a comment."""
    name = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line)
    return re.sub(r"[-_.]+", "-", name[0]).lower() if name else ""


def environment(
    python: str, jax: str, log: pathlib.Path, folder: pathlib.Path = ENVIRONMENTS, package: str = ".[dev]"
) -> pathlib.Path:
    """The ``bin`` of an environment with this JAX in ``folder``; made unless it is there and still right.

    Args:
      python: the interpreter.
      jax: the version.
      log: what pip says is added to this file.
      folder: of all environments.
      package: what is installed: the checkout with what developers need, or a file with a package, which is always
        installed into an empty environment.

    Raises:
      UnusableError: it can't be made.
    """
    major, minor = version_of(python)
    place = folder / f"{major}.{minor}-{jax}"
    constraints = lock((ROOT / "constraints.txt").read_text(), LOCKS[jax].read_text())
    projects = "".join((folder / "pyproject.toml").read_text() for folder in (ROOT, MIGRATE))
    wanted = hashlib.sha256((constraints + projects + python).encode()).hexdigest()
    stamp, bin = place / ".ready", place / "bin"
    is_checkout = package.startswith(".")
    if is_checkout and stamp.exists() and stamp.read_text() == wanted:
        return bin
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(exist_ok=True)
    what = ["-e", package, "-e", str(MIGRATE)] if is_checkout else [package]
    commands = ([python, "-m", "venv", str(place)], [str(bin / "python"), "-m", "pip", "install", *what])
    constrained = place.with_suffix(place.suffix + ".txt")
    constrained.write_text(constraints)
    settings = {"PIP_CONSTRAINT": str(constrained), "PIP_BUILD_CONSTRAINT": str(constrained)}
    for command in commands:
        if logged(command, log, settings):
            raise UnusableError(f"its environment can't be made: see {log.relative_to(ROOT)}")
    stamp.write_text(wanted)
    return bin


def logged(command: Sequence[str], log: pathlib.Path, settings: dict[str, str], cwd: pathlib.Path = ROOT) -> int:
    """Run a command with further environment variables; its output is added to ``log``, and its status returned."""
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        done = subprocess.run(
            command, cwd=cwd, stdout=file, stderr=subprocess.STDOUT, env=os.environ | settings, check=False
        )
    return done.returncode


def tally(text: str) -> tuple[int, int]:
    """How many tests passed and failed, by the lines that pytest ends with."""
    passed = failed = 0
    for line in re.findall(r"^=+ (.* in [0-9.]+s.*) =+$", text, flags=re.MULTILINE):
        for count, what in re.findall(r"(\d+) (passed|failed|errors?)", line):
            passed, failed = (passed + int(count), failed) if what == "passed" else (passed, failed + int(count))
    return passed, failed


def combination(name: str, jax: str, arguments: Sequence[str]) -> Row | None:
    """Run the tests with one JAX on one Python; ``None`` if that JAX does not support it."""
    try:
        python = interpreter(name)
        version = version_of(python)
        if not supports(jax, version):
            return None
        ENVIRONMENTS.mkdir(exist_ok=True)
        log = ENVIRONMENTS / f"{version[0]}.{version[1]}-{jax}.log"
        log.write_text("")
        bin = environment(python, jax, log)
    except UnusableError as trouble:
        return Row(name, jax, trouble=str(trouble))
    begin = time.monotonic()
    settings = {"JAX_PLATFORMS": "cpu"}
    pytest = [str(bin / "python"), "-m", "pytest", "-p", "no:cacheprovider"]
    status = logged([*pytest, FIRST], log, settings)
    status |= logged([*pytest, f"--ignore={FIRST}", *arguments], log, settings)
    passed, failed = tally(log.read_text())
    trouble = "" if failed or not status else f"pytest did not get to its end: see {log.relative_to(ROOT)}"
    return Row(name, jax, passed, failed, time.monotonic() - begin, trouble)


def table(rows: Iterable[Row]) -> str:
    """All rows, in columns."""
    cells = [("Python", "JAX", "result", "tests", "time"), *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)


def run(
    pythons: Sequence[str], versions: Sequence[str], one: Callable[[str, str], Row | None], say: Callable[[str], None]
) -> bool:
    """Run ``one`` for each combination, and say what came of it; whether all were good."""
    rows = []
    for python in pythons:
        for jax in versions:
            say(f"Python {python}, JAX {jax} …")
            row = one(python, jax)
            if row is None:
                say("  JAX does not support it")
            else:
                rows.append(row)
                say("  " + ", ".join(filter(None, row.cells()[2:])))
    say("\n" + table(rows))
    return bool(rows) and all(row.is_good for row in rows)


def main() -> int:
    """The command: combinations and pytest's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", default="3.11 3.12 3.13", help="versions, commands or paths, parted by spaces")
    parser.add_argument("--jax", default=" ".join(LOCKS), help="versions that tests/matrix/ has a file for")
    options, arguments = parser.parse_known_args()
    versions = options.jax.split()
    if missing := [version for version in versions if version not in LOCKS]:
        parser.error(f"tests/matrix/ has no file for JAX {', '.join(missing)}; it has {', '.join(LOCKS)}")
    good = run(options.pythons.split(), versions, lambda p, j: combination(p, j, arguments), _say)
    return 0 if good else 1


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
