"""Programs as files: Python and notebooks, read so that nothing but what is meant to change ever does."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import os
import re
import sys
import tokenize
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

_SKIPPED = {"__pycache__", "node_modules", "site-packages", "build", "dist"}
_SKIPPED_FILES = (".#", "._")
"""How the names of Emacs' locks and of macOS' attributes begin."""

_NEWLINE = re.compile(r"\r\n|\r|\n")
_PYTHON_2 = re.compile(
    r"""^\s*(print\s+[^(=\s]|print\s*$|exec\s+["'\w]|raise\s+\w+\s*,|except\s+[\w.]+\s*,\s*\w+\s*:)|`\w+`|<>|(?<![\w.])0[0-7]+\b(?!\.)|\bur["']""",
    re.MULTILINE,
)
_WORDS = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|#.*""")
"""Strings and comments, as far as a line by itself can tell."""

_MAGIC = re.compile(r"^(\s*)(!|%\w|\?|[\w.]+\?+\s*$|[\w.,*()\[\] ]+=\s*[!%])")
_TIMED = re.compile(r"^(\s*)(%(?:time|timeit)(?:\s+-\w+(?:\s+\d+)?)*\s+)(?=\S)(?!(?:for|while|if|with|try|async)\b)")
"""A magic before a statement: of those on one line, which can stand behind a colon."""

SUFFIXES = (".py", ".ipynb")
"""Of the names of Python files and of notebooks."""

STANDARD_INPUT = Path("-")
"""The file that stands for standard input."""


class UnreadableError(Exception):
    """A file can't be read as a program; the message says why, in one line."""


@dataclasses.dataclass(frozen=True)
class SourceProgram:
    """A program that has been read."""

    path: Path
    text: str  # all of it; of a notebook, that of its code cells
    tree: ast.Module  # the same, parsed
    raw: bytes = b""  # of the file
    encoding: str = "utf-8"
    cells: tuple[int, ...] = ()  # of a notebook, the line that each code cell starts at; empty for a Python file
    left_out: tuple[str, ...] = ()  # what could not be read of a notebook

    @property
    def lines(self) -> list[str]:
        """Its lines, as :mod:`ast` counts them, without their ends."""
        return _NEWLINE.split(self.text)

    def place(self, line: int, column: int) -> str:
        """Where something is, as editors understand it: ``file:line:column``."""
        if not self.cells:
            return f"{'<stdin>' if self.path == STANDARD_INPUT else self.path}:{line}:{column}"
        number = max(i for i, start in enumerate(self.cells, 1) if start <= line)
        return f"{self.path}[cell {number}]:{line - self.cells[number - 1] + 1}:{column}"


def program_files(arguments: Iterable[Path], on_error: Callable[[OSError], object]) -> list[Path]:
    """The files that arguments name: files as they are, folders with all Python files and notebooks in them."""
    found: dict[Path, None] = {}
    for argument in arguments:
        if not argument.is_dir():
            found[argument] = None
            continue
        for folder, folders, files in os.walk(argument, onerror=on_error):
            folders[:] = sorted(f for f in folders if f not in _SKIPPED and not f.startswith("."))
            names = (f for f in sorted(files) if f.endswith(SUFFIXES) and not f.startswith(_SKIPPED_FILES))
            paths = (Path(folder, name) for name in names)
            found.update((path, None) for path in paths if os.path.isfile(path) or not os.path.exists(path))  # no pipe
    return list(found)


def read_program(path: Path) -> SourceProgram:
    """Read a Python file, a notebook, or standard input."""
    try:
        raw = sys.stdin.buffer.read() if path == STANDARD_INPUT else path.read_bytes()
    except OSError as error:
        raise UnreadableError(f"can't be read ({error.strerror or error})") from error
    if path.suffix == ".ipynb":
        return _read_notebook(path, raw)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = raw.decode(encoding)
    except (SyntaxError, UnicodeError, LookupError) as error:
        raise UnreadableError(f"is not text in UTF-8, or in the encoding that it names ({error})") from error
    return SourceProgram(path, text, parse(text), raw, encoding)


def parse(text: str) -> ast.Module:
    """The tree of a program."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about the program's own strings
            return ast.parse(text)
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        line = _NEWLINE.split(text)[error.lineno - 1 : error.lineno] if error.lineno else []
        if any(_PYTHON_2.search(_WORDS.sub('""', each)) for each in line):
            raise UnreadableError(f"{where}is Python 2; convert it to Python 3 first, for example with 2to3") from error
        raise UnreadableError(f"{where}is no Python ({error.msg})") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UnreadableError(f"is no Python that can be read ({error})") from error


def _read_notebook(path: Path, raw: bytes) -> SourceProgram:
    try:
        cells = json.loads(raw)["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableError("is not a notebook of version 4, which has cells with a source") from error
    kept: list[str] = []
    starts: list[int] = []
    left_out = []
    line = 1
    for number, source in enumerate(sources, 1):
        try:
            code = _code(source)
        except UnreadableError as error:
            left_out.append(f"cell {number}: {error}")
            code = "\n" * (len(_NEWLINE.split(source)) - 1)
        starts.append(line)
        kept.append(code)
        line += len(_NEWLINE.split(code))
    text = "\n".join(kept)
    return SourceProgram(path, text, parse(text), raw, cells=tuple(starts) or (1,), left_out=tuple(left_out))


def _code(source: str) -> str:
    """The Python of a cell, in as many lines; raises an ``UnreadableError`` if it has none."""
    try:
        parse(source)
    except UnreadableError:
        source = _without_magic(source)
        parse(source)
    return source


def _without_magic(source: str) -> str:
    """A cell with ``pass`` for what is no Python in it, line by line."""
    lines = _NEWLINE.split(source)
    first = next((i for i, line in enumerate(lines) if line.strip()), 0)
    if lines[first].startswith("%%"):
        if not re.match(r"%%(writefile\s+(-a\s+)?\S+\.py\b|time|timeit|capture)", lines[first]):
            return "\n" * (len(lines) - 1)
        lines[first] = "pass"
    indent = re.match(r"\s*", next((line for line in lines if line.strip()), ""))
    if indent and indent[0]:  # which IPython takes off, too
        lines = [line.removeprefix(indent[0]) for line in lines]
    goes_on, inside = False, ""
    for i, line in enumerate(lines):
        if timed := _TIMED.match(line):
            lines[i] = f"{timed[1]}{'if 1:'.ljust(len(timed[2]))}{line[timed.end() :]}"  # each word in its column
            continue
        magic = _MAGIC.match(line)
        if magic or goes_on:
            inside = magic[1] if magic else inside
            lines[i] = f"{inside}pass"
            goes_on = line.endswith("\\")
    return "\n".join(lines)
