"""``replicax migrate``: what takes the place of each use of ``tf.distribute`` in a program."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replicax.cli.command_line import NOT_WRITTEN, InputError, why_not_writable, written
from replicax.system.quantities import counted

if TYPE_CHECKING:
    from replicax_migrate.source_files import SourceProgram
    from replicax_migrate.uses import NameUse

_PROG = "replicax migrate"
_EPILOG = """\
One line for each use: FILE:LINE:COLUMN  the name → what replaces it. The first use in a file also names what behaves
differently. For the tower API of TensorFlow 1.9 to 1.12 the line has the name in replicax.compat.v1, and today's. A "?"
marks a guess: either only the name suggests it, or the value comes from TensorFlow in one branch but not in another.

--write applies pure renames, and adds the import that they need. It changes no other byte: tensors, variables, models
and optimizers are for you to change. It leaves notebooks alone, and a second run changes nothing.

Exit status: 0 if every use has a counterpart; 1 if a use has none, or a file or folder could not be read, or the output
was closed, after all other files were read; 2 if an argument was wrong, such as a file that is not there, and nothing
was done; 3 if a file could not be written.
"""


def add_parser(subparsers: Any) -> None:
    """Describe the command to ``argparse``."""
    parser = subparsers.add_parser(
        "migrate",
        help="list the uses of tf.distribute in a program, and what replaces each",
        description="Print each use of tf.distribute or tf.contrib.distribute in a program, and what replaces it. The "
        "command runs none of your code, and needs no TensorFlow.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        type=_named,
        help="a Python file, a notebook, a folder, or - for a program on standard input",
    )
    parser.add_argument("--write", action="store_true", help="apply pure renames")
    parser.add_argument("--json", type=_named, metavar="FILE", help="write the report as JSON")
    parser.set_defaults(run=run)


def _named(text: str) -> Path:
    """The file of an argument, which is not the current folder if it is empty, as that of a shell's unset variable."""
    if not text:
        raise argparse.ArgumentTypeError("must name a file, got an empty string")
    return Path(text)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 0, 1 if something has no counterpart or can't be read, or 3 if it can't be written."""
    from replicax_migrate.source_files import STANDARD_INPUT, SUFFIXES, UnreadableError, program_files, read_program
    from replicax_migrate.uses import find_uses

    for path in args.files:
        if path == STANDARD_INPUT:
            if args.write:
                raise InputError("--write can't change standard input; name a file")
            continue
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise InputError(f"there is no file {path}") from error
        except OSError as error:
            raise InputError(f"{path} can't be read ({error.strerror})") from error
        if path.is_file() and path.suffix not in SUFFIXES:
            raise InputError(f"{path} is neither a Python file (.py) nor a notebook (.ipynb)")
    if args.json is not None and (why := why_not_writable(args.json)) is not None:
        raise InputError(f"--json {args.json}: can't be written ({why})")

    failures: list[OSError] = []
    files = program_files(args.files, failures.append)
    for failure in failures:
        print(f"{_PROG}: {failure.filename}: can't be read ({failure.strerror})", file=sys.stderr)
    report, uses_of_all, read, edits, failed, unwritten = [], [], 0, 0, bool(failures), False
    for path in files:
        try:
            program = read_program(path)
            uses = find_uses(program.tree, program.lines)
        except (UnreadableError, RecursionError) as error:
            print(f"{_PROG}: {path}: {error}", file=sys.stderr)
            failed = True
            continue
        for what in program.left_out:
            print(f"{_PROG}: {path}: {what}", file=sys.stderr)
            failed = True
        read += 1
        uses_of_all += uses
        edits += sum(use.edit is not None for use in uses if not program.cells)
        _show(program, uses)
        report += [_as_data(program, use) for use in uses]
        unwritten |= args.write and not _write(program, uses)
    print(_summary(read, uses_of_all, 0 if args.write else edits))
    if args.json is not None:
        text = json.dumps(report, indent=1) + "\n"  # in ASCII, as names of files may be no text
        if (why := written(args.json, lambda path: path.write_text(text, encoding="utf-8"))) is not None:
            print(f"{_PROG}: {why}", file=sys.stderr)
            unwritten = True
    failed |= any(use.counterpart.is_nothing for use in uses_of_all)
    return NOT_WRITTEN if unwritten else int(failed)


def _show(program: SourceProgram, uses: list[NameUse]) -> None:
    seen: set[str] = set()
    for use in uses:
        line = f"{program.place(use.line, use.column)}  {use.name}{' ?' if use.is_assumed else ''} → {_words(use)}"
        if use.counterpart.differs is not None and use.counterpart.differs not in seen:
            seen.add(use.counterpart.differs)
            line += f"; {use.counterpart.differs}"
        print(line)


def _words(use: NameUse) -> str:
    counterpart = use.counterpart
    if counterpart.modern is None:
        return counterpart.today
    where = " in replicax.compat.v1" if counterpart.today == "the same" else ""
    return f"{counterpart.today}{where} (today: {counterpart.modern})"


def _write(program: SourceProgram, uses: list[NameUse]) -> bool:
    """Write today's names into a program; returns whether that went well."""
    from replicax_migrate.rewriting import binds_replicax, rewritten, write_program
    from replicax_migrate.source_files import UnreadableError

    if program.cells:
        if any(use.edit for use in uses):
            print(f"{program.path}: a notebook, which --write leaves alone", file=sys.stderr)
        return True
    try:
        text = rewritten(program, uses)
        if text == program.text:
            if any(use.edit for use in uses) and binds_replicax(program):
                print(f"{program.path}: has a replicax of its own, so --write leaves it alone", file=sys.stderr)
            return True
        write_program(program, text)
    except (OSError, UnicodeError, UnreadableError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        print(f"{_PROG}: {program.path}: can't be written ({reason})", file=sys.stderr)
        return False
    print(f"Written: {program.path}")
    return True


def _summary(read: int, uses: list[NameUse], edits: int) -> str:
    kinds = collections.Counter(_status(use) for use in uses)
    parts = [
        f"{kinds[status]} {words}"
        for status, words in (
            ("name", "with a name of today"),
            ("tower", "that stay in replicax.compat.v1"),
            ("stays", "that stay"),
            ("by hand", "to be changed by hand"),
            ("leave out", "to be left out"),
            ("nothing", "without a counterpart"),
        )
        if kinds[status]
    ]
    names = len({use.name.rpartition(".")[2] for use in uses})
    write = f" --write can rename {edits}." if edits else ""
    found = f"{counted(len(uses), 'use')} of {counted(names, 'name')} in {counted(read, 'file')}"
    return f"{found}: {', '.join(parts)}.{write}" if parts else f"{found}."


def _status(use: NameUse) -> str:
    counterpart = use.counterpart
    if counterpart.is_nothing:
        return "nothing"
    if counterpart.modern is not None:
        return "tower"
    if counterpart.today.startswith(("nothing", "leave it out")):
        return "leave out"
    if counterpart.today.startswith("the same"):
        return "stays"
    return "name" if counterpart.is_renaming else "by hand"


def _as_data(program: SourceProgram, use: NameUse) -> dict[str, Any]:
    found = dataclasses.asdict(use.counterpart)
    where = {"place": program.place(use.line, use.column), "name": use.name, "status": _status(use)}
    return {**where, **found, "is_assumed": use.is_assumed}
