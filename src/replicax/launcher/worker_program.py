"""The program that each worker runs: a Python file, a module, or anything else that can be executed."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder

from replicax.launcher import LaunchError


@dataclasses.dataclass(frozen=True)
class WorkerProgram:
    """The program of the workers."""

    words: tuple[str, ...]  # as the user wrote it: ``("train.py", "--rate", "0.1")``, ``("-m", "package.train")``

    @property
    def command(self) -> tuple[str, ...]:
        """The arguments of the worker's process; Python files and modules run on this process's Python."""
        if self.words[0] == "-m" or self.words[0].endswith(".py"):
            return (sys.executable, *self.words)
        first = self.words[0]
        return (first if os.sep in first else os.path.join(os.curdir, first), *self.words[1:])

    @property
    def name(self) -> str:
        """A short name, such as ``"train"``."""
        first = self.words[1].rpartition(".")[2] if self.words[0] == "-m" else os.path.basename(self.words[0])
        return first.removesuffix(".py")

    def check(self) -> None:
        """Raise a LaunchError unless the program exists. Does not import it."""
        if self.words[0] == "-m":
            _check_module(self.words[1])
            return
        path = self.words[0]
        if os.path.isdir(path):
            raise LaunchError(f"{path} is a folder: expected a Python file, or -m and a module")
        if not os.path.exists(path):
            raise LaunchError(f"there is no file {path} in {os.getcwd()}")
        if path.endswith(".py"):
            if not os.access(path, os.R_OK):
                raise LaunchError(f"{path} can't be read (Permission denied)")
        elif not os.access(path, os.X_OK):
            raise LaunchError(
                f"{path} is neither a Python file (its name does not end in .py) nor executable (chmod +x {path})"
            )


def _check_module(name: str) -> None:
    """Raise a LaunchError unless there is a module ``name``; does not import the packages around it."""
    path: Sequence[str] | None = [os.getcwd(), *sys.path]
    parts = name.split(".")
    for i in range(len(parts)):
        so_far = ".".join(parts[: i + 1])
        spec = PathFinder.find_spec(so_far, path) if path is not None and parts[i] else None
        if spec is None and i == 0 and so_far:  # a package that is installed to be edited has its own finder
            spec = next(filter(None, (finder.find_spec(so_far, None) for finder in sys.meta_path)), None)
        if spec is None:
            raise LaunchError(
                f"there is no module {so_far!r} here ({os.getcwd()}) or in {sys.prefix}"
                + (f", and so none {name!r}" if so_far != name else "")
            )
        path = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    if path is not None and PathFinder.find_spec(f"{name}.__main__", path) is None:
        raise LaunchError(f"{name!r} is a package without a __main__: name one of its modules, such as {name}.train")


def parsed(words: Sequence[str], *, is_here: bool = True) -> WorkerProgram:
    """The program that ``words`` name: a script, or ``-m`` and a module, and its arguments, perhaps behind a ``--``.

    It must exist if it ``is_here``: if it is to run on this machine. Raises a LaunchError if there is no such program.
    """
    rest = tuple(words[1:] if words and words[0] == "--" else words)
    if not rest:
        raise LaunchError("expected a script, or -m and a module, after the options")
    if rest == ("-m",):
        raise LaunchError("-m: expected the name of a module after it")
    program = WorkerProgram(rest)
    if is_here:
        program.check()
    return program
