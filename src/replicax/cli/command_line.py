"""Arguments of commands, and what happens when they are wrong: one line, and exit status 2."""

from __future__ import annotations

import argparse
from typing import NoReturn


class CommandError(Exception):
    """A command can't run with the input that it got; the message is one line that says what to change."""


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that raises :class:`CommandError` instead of printing its usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{self.prog}: error: {message} (see {self.prog} --help)")


def positive_int(text: str) -> int:
    """The type of an argument that must be 1 or more."""
    number = _int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def seed(text: str) -> int:
    """The type of an argument that seeds random numbers, in Grain as in JAX."""
    number = _int(text)
    if not 0 <= number < 2**31:
        raise argparse.ArgumentTypeError(f"must be from 0 to 2147483647, got {text}")
    return number


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
