"""The command line: the commands of ``replicax``.

Each command is a module with ``add_parser(subparsers)`` that describes its arguments and names the function
that runs it. Modules here import nothing heavy until their command runs, so that ``replicax --help`` is quick.

Another distribution adds a command by an entry point of the group ``replicax.commands``, with the command's name and
such a module as its value. If that can't be loaded, only this command is an error.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Any

from replicax import __version__
from replicax.cli import demo, doctor, env, launch, plan
from replicax.cli.command_line import UNREAD, InputError, OutputError, Parser, add_absent, standard_streams
from replicax.errors import described

_COMMANDS = (demo, plan, launch, doctor, env)
_GROUP = "replicax.commands"
_EXTRAS = {"migrate": "list the uses of tf.distribute in a program, and what replaces each"}
"""Commands that other distributions contain, installed by the extra of the same name, with their help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit status of the process.

    Args:
      argv: the arguments, without the name of the program; by default those of the process.

    Returns:
      0 if all went well, 1 if the command ran and reports a failure or standard output can't be written, 2 if its
      input was wrong (one line on standard error says how, and nothing was run), 3 if a file could not be written
      after all, 130 if it was interrupted, 141 if the reader of standard output has closed it.
    """
    try:
        return _run(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="replicax", description="Write the training step for one replica; choose where it runs.")
    parser.add_argument("--version", action="version", version=f"replicax {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="command", dest="command", required=True)
    for command in _COMMANDS:
        command.add_parser(subparsers)
    for entry in importlib.metadata.entry_points(group=_GROUP):
        _add_command(subparsers, entry)
    for name, purpose in _EXTRAS.items():
        if name not in subparsers.choices:
            install = f"pip install 'replicax[{name}]'"
            add_absent(subparsers, name, f"{purpose} ({install})", f"the command is not installed: {install}")
    try:
        with standard_streams():
            args, unknown = parser.parse_known_args(argv)
            if unknown:
                see = f"{parser.prog} {args.command} --help"
                raise InputError(f"unrecognized arguments: {' '.join(unknown)} (see {see})")
            return int(args.run(args))
    except InputError as error:
        print(f"{error.program or f'{parser.prog} {args.command}'}: error: {error}", file=sys.stderr)
        return 2
    except OutputError as error:
        if isinstance(error.__cause__, BrokenPipeError):  # which is usual, as in "| head"
            return UNREAD
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1


def _add_command(subparsers: Any, entry: importlib.metadata.EntryPoint) -> None:
    """Add the command of another distribution; those of Replicax, and of distributions before, keep their names."""
    if entry.name in subparsers.choices:
        return
    try:
        add_parser = entry.load().add_parser
        add_parser(Parser().add_subparsers())  # a trial: the help would keep the line of a parser that was begun
        add_parser(subparsers)
    except Exception as error:
        of = "another distribution" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
        why = f"the command can't be loaded from {entry.value} of {of}: {' '.join(described(error).split())}"
        add_absent(subparsers, entry.name, f"can't be loaded from {of}", why)
