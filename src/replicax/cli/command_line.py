"""Shared parts of the commands: errors in one line with exit status 2, and checks of files before the work."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

PROGRAMS = frozenset({".py", ".ipynb"})
"""The ends of the names of programs, in whose place no report is written."""
UNREAD = 141
"""The exit status if the reader of standard output has closed it: in a shell, that of a process ended by SIGPIPE."""
NOT_WRITTEN = 3
"""The exit status if the work was done but a file could not be written."""


class InputError(Exception):
    """A command can't run with the given input; the message is one line that says what to change.

    :func:`replicax.cli.main` puts the command's name before it, or ``program`` if the command is not known yet.
    """

    def __init__(self, message: str, program: str = "") -> None:
        super().__init__(message)
        self.program = program


class OutputError(Exception):
    """Standard output can't be written; the cause is the ``OSError``."""


class _Paragraphs(argparse.HelpFormatter):
    """Fits each paragraph of a description to the terminal, but for those with indented lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(p if "\n  " in f"\n{p}" else fill(p, width, indent) for p in paragraphs)


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that raises :class:`InputError` instead of printing its usage and exiting."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **({"formatter_class": _Paragraphs} | kwargs))

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see {self.prog} --help)", self.prog)


def is_unread(error: BaseException) -> bool:
    """Return whether the reader of standard output has closed it, as after ``| head``; Rich's consoles exit then."""
    if isinstance(error, SystemExit):
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        return frame.f_globals.get("__name__") == "rich.console"
    if not isinstance(error, BrokenPipeError):
        return False
    poll = select.poll()
    try:
        poll.register(sys.stdout, 0)
    except (TypeError, ValueError):  # it is closed, or no file
        return False
    return bool(poll.poll(0))  # an error, or else the user's own pipe is broken


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Inside, Ctrl-C ends the process at once, as native code that it interrupts while it is imported may abort it."""

    def end(*_: object) -> NoReturn:
        with contextlib.suppress(OSError):  # standard error may be closed
            os.write(2, b"interrupted\n")
        os._exit(130)

    is_ours = threading.current_thread() is threading.main_thread()  # or no handler can be set
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # the program's, or ignored
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Opens closed streams, reports failures of standard output, and escapes characters that its encoding lacks.

    Raises an OutputError if standard output is closed, or a write to it fails.
    """
    # If standard input or output is closed, any use of it fails. No other file gets the number of a closed stream.
    for name, mode, flags in (("stdin", "r", os.O_WRONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, flags), mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    except OSError:
        _write_out("\n")  # fails again if it was standard output that could not be written
        raise
    except SystemExit as error:
        if is_unread(error):
            raise OutputError("standard output can't be written (Broken pipe)") from error.__context__
        raise
    finally:
        _write_out("")


def _write_out(text: str) -> None:
    try:
        print(end=text, flush=True)
    except OSError as error:
        with contextlib.suppress(OSError):  # or Python's own flush at the end fails, too
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputError(f"standard output can't be written ({error.strerror or error})") from error


def add_absent(subparsers: Any, name: str, purpose: str, why: str) -> None:
    """Describe a command that can't run: with any arguments, it tells ``why``."""

    def refuse(args: argparse.Namespace) -> NoReturn:
        raise InputError(why)

    # Without prefix characters the parser takes options as arguments, too; in a help text % has a meaning.
    parser = subparsers.add_parser(name, help=purpose.replace("%", "%%"), prefix_chars="\0", add_help=False)
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


def _number(most: float, expected: str) -> Callable[[str], float]:
    """A type of arguments that are numbers above 0, and not above ``most``."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        if not 0 < number <= most:
            raise argparse.ArgumentTypeError(f"must be {expected}, got {text!r}")
        return number

    return parse


positive_float = _number(sys.float_info.max, "a positive number")
seconds = _number(3600, "a number of seconds, above 0 and at most 3600")


def why_not_writable(path: Path) -> str | None:
    """The reason why ``path`` can't be written, as far as it is known beforehand; ``None`` if there is none.

    Leaves an existing file unchanged, and leaves no new file behind.
    """
    try:
        if any(Path(name).suffix in PROGRAMS for name in (path, os.path.realpath(path))):
            return "it is a program, or has the name of one"
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
