"""Build the wheels and sdists, look into them, and try the wheels in empty environments: ``make dist``.

There are two packages, ``replicax`` and ``replicax-migrate``. Their wheels are built from their sdists, which shows
that these are enough to build from. Then each Python gets an empty environment with each JAX that it supports, with the
wheel of Replicax and what it asks for, at the versions of the lock. There, in an empty folder far from the checkout,
the smoke test, ``replicax demo`` and ``replicax doctor`` have to work. ``replicax migrate`` has to say how to install
it, and to work once it is installed. A table at the end has all combinations, and their output lies beside their
environments, in ``.venv-dist``.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from tests.matrix.run import (
    LOCKS,
    MIGRATE,
    ROOT,
    Row,
    UnusableError,
    environment,
    interpreter,
    logged,
    run,
    supports,
    version_of,
)

DIST = ROOT / "dist"
ENVIRONMENTS = ROOT / ".venv-dist"
SMOKE = ROOT / "tests" / "matrix" / "smoke.py"
TOOLS = ["build", "check-jsonschema", "hatch-fancy-pypi-readme", "hatchling", "twine"]
WORKFLOWS = ROOT / ".github" / "workflows"


def build(python: str, log: pathlib.Path) -> pathlib.Path:
    """Make ``dist`` anew, and return the wheel of Replicax.

    Raises:
      UnusableError: something can't be built, is not fit for a package index, or has wrong contents.
    """
    bin = ENVIRONMENTS / "build" / "bin"
    shutil.rmtree(bin.parent, ignore_errors=True)
    shutil.rmtree(DIST, ignore_errors=True)
    constraints = f"{ROOT / 'constraints.txt'} {ROOT / 'tests' / 'matrix' / 'dist-tools.txt'}"
    commands = (
        [python, "-m", "venv", str(bin.parent)],
        [str(bin / "python"), "-m", "pip", "install", *TOOLS],
        *(
            [str(bin / "python"), "-m", "build", "--no-isolation", "--outdir", str(DIST), str(folder)]
            for folder in (ROOT, MIGRATE)
        ),
    )
    for command in commands:
        if logged(command, log, {"PIP_CONSTRAINT": constraints}):
            raise UnusableError(f"{' '.join(command[1:4])} failed: see {log.relative_to(ROOT)}")
    packages, workflows = map(str, sorted(DIST.iterdir())), map(str, sorted(WORKFLOWS.glob("*.yml")))
    if logged([str(bin / "twine"), "check", "--strict", *packages], log, {}):
        raise UnusableError(f"the description is not fit for a package index: see {log.relative_to(ROOT)}")
    if logged([str(bin / "check-jsonschema"), "--builtin-schema", "vendor.github-workflows", *workflows], log, {}):
        raise UnusableError(f"a workflow is not what it should be: see {log.relative_to(ROOT)}")
    [wheel] = DIST.glob("replicax-*.whl")
    [wheel_of_migrate] = DIST.glob("replicax_migrate-*.whl")
    wrong = [
        *wrong_in_wheel(_names(wheel), ROOT),
        *wrong_in_wheel(_names(wheel_of_migrate), MIGRATE, "replicax_migrate"),
        *wrong_in_sdist(_sources("replicax-"), ROOT),
        *wrong_in_sdist(_sources("replicax_migrate-"), MIGRATE),
    ]
    if wrong:
        raise UnusableError("; ".join(wrong))
    return wheel


def _names(wheel: pathlib.Path) -> list[str]:
    with zipfile.ZipFile(wheel) as file:
        return file.namelist()


def _sources(name: str) -> list[str]:
    [sdist] = DIST.glob(f"{name}*.tar.gz")
    with tarfile.open(sdist) as archive:
        return [path.partition("/")[2] for path in archive.getnames()]


def wrong_in_wheel(names: Iterable[str], root: pathlib.Path, package: str = "replicax") -> list[str]:
    """What a wheel should have and has not, and what it should not have: sentences."""
    found = set(names)
    programs = {path.relative_to(root / "examples").as_posix() for path in (root / "examples").rglob("*.py")}
    modules = {path.relative_to(root / "src").as_posix() for path in (root / "src").rglob("*.py")}
    wanted = {*modules, f"{package}/py.typed", *(f"{package}/_examples/{name}" for name in programs)}
    wrong = [f"the wheel has no {name}" for name in sorted(wanted - found)]
    for name in sorted(found - wanted):
        is_expected = name.startswith(f"{package}/_examples/") or ".dist-info/" in name
        if not is_expected or name.endswith((".pyc", ".log")):
            wrong.append(f"the wheel has {name}")
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in found):
        wrong.append("the wheel has no LICENSE")
    return wrong


def wrong_in_sdist(names: Iterable[str], root: pathlib.Path) -> list[str]:
    """The same of an sdist: whoever packages Replicax anew runs its tests from there."""
    found = set(names)
    wanted = ["pyproject.toml", "README.md", "LICENSE"]
    wanted += ["CHANGELOG.md", "Makefile", "constraints.txt"] if root == ROOT else []
    wanted += [
        path.relative_to(root).as_posix() for folder in ("src", "tests") for path in (root / folder).rglob("*.py")
    ]
    wrong = [f"the sdist has no {name}" for name in wanted if name not in found]
    return wrong + [f"the sdist has {name}" for name in sorted(found) if name.split("/")[0].startswith(".venv")]


def combination(wheel: pathlib.Path, name: str, jax: str) -> Row | None:
    """Try the wheel with one JAX on one Python; ``None`` if that JAX does not support it."""
    try:
        python = interpreter(name)
        version = version_of(python)
        if not supports(jax, version):
            return None
        log = ENVIRONMENTS / f"{version[0]}.{version[1]}-{jax}.log"
        log.write_text("")
        bin = environment(python, jax, log, ENVIRONMENTS, f"replicax[demo] @ {wheel.as_uri()}")
    except UnusableError as trouble:
        return Row(name, jax, trouble=str(trouble))
    begin = time.monotonic()
    replicax = str(bin / "replicax")
    add_migrate = [str(bin / "python"), "-m", "pip", "install", "--no-deps", "--find-links", str(DIST)]
    commands = (
        ([str(bin / "python"), "-I", str(SMOKE), jax], 0),
        ([replicax, "demo", "--replicas", "4", "--epochs", "5"], 0),  # how quick 30 are depends on the machine
        ([replicax, "doctor", "--timeout", "60"], 0),
        ([replicax, "migrate", "."], 2),
        ([*add_migrate, "replicax-migrate"], 0),
        ([replicax, "migrate", "."], 0),
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": "", "PIP_CONSTRAINT": "", "PIP_NO_INDEX": "1"}
        statuses = [logged(command, log, settings, pathlib.Path(folder)) == status for command, status in commands]
    failed = statuses.count(False)
    return Row(name, jax, len(commands) - failed, failed, time.monotonic() - begin)


def main() -> int:
    """The command: which Pythons, and which JAX."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", default="3.11 3.12 3.13", help="versions, commands or paths, parted by spaces")
    parser.add_argument("--jax", default=" ".join(LOCKS), help="versions that tests/matrix/ has a file for")
    options = parser.parse_args()
    ENVIRONMENTS.mkdir(exist_ok=True)
    log = ENVIRONMENTS / "build.log"
    log.write_text("")
    try:
        wheel = build(interpreter(options.pythons.split()[0]), log)
    except UnusableError as trouble:
        print(trouble, file=sys.stderr)
        return 1
    print(*(f"dist/{path.name}: {path.stat().st_size / 1e6:.2f} MB" for path in sorted(DIST.iterdir())), sep="\n")
    good = run(options.pythons.split(), options.jax.split(), lambda p, j: combination(wheel, p, j), _say)
    return 0 if good else 1


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
