"""Shared parts of the commands: errors in one line with exit status 2, and checks of files before the work."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

NOT_WRITTEN = 3
"""The exit status if the work was done but a file could not be written."""


class CommandError(Exception):
    """A command can't run with the given input; the message is one line that says what to change."""


class InputError(Exception):
    """The same, in a message before which :func:`replicax.cli.main` puts the command's name."""


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that raises :class:`CommandError` instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{self.prog}: error: {message} (see {self.prog} --help)")


def add_absent(subparsers: Any, name: str, purpose: str) -> None:
    """Describe a command that is not installed: with any arguments, it tells how to install it."""
    install = f"pip install 'replicax[{name}]'"

    def refuse(args: argparse.Namespace) -> NoReturn:
        raise CommandError(f"replicax {name}: error: the command is not installed: {install}")

    # Without prefix characters the parser takes options as arguments, too.
    parser = subparsers.add_parser(name, help=f"{purpose} ({install})", prefix_chars="\0", add_help=False)
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(run=refuse)


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A type of arguments that are whole numbers."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
        if number < least or (most is not None and number > most):
            allowed = f"at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"must be {allowed}, got {text}")
        return number

    return parse


positive_int = whole(1)
seed = whole(0, 2**31 - 1)
"""Valid for Grain and JAX."""


def seconds(text: str) -> float:
    """Parse a time in seconds."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 < found <= 3600:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, above 0 and at most 3600, got {text}")
    return found


def why_not_writable(path: Path) -> str | None:
    """The reason why ``path`` can't be written, as far as it is known beforehand; ``None`` if there is none.

    Leaves an existing file unchanged, and leaves no new file behind.
    """
    try:
        if path.is_dir():
            return "it is a folder"
        if not path.parent.is_dir():
            return f"there is no folder {path.parent}"
        is_there = os.path.lexists(path)
        if is_there and not path.is_file():
            return None  # a device, a pipe or a broken link, which an attempt could change
        with path.open("ab"):
            pass
        if not is_there:
            path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None


def written(path: Path, write: Callable[[Path], object]) -> str | None:
    """Write ``path``; returns the reason if that failed."""
    try:
        write(path)
    except OSError as error:
        return f"{path}: can't be written ({error.strerror or error})"
    return None
