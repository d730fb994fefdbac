"""Commands of other distributions: found by their entry points; without them, what to install."""

from __future__ import annotations

import importlib.metadata
import sys
import types

import pytest

from replicax.cli import main


def entry_points(monkeypatch, *found: importlib.metadata.EntryPoint) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)


@pytest.mark.parametrize("arguments", [[], ["train.py"], ["--write", "train.py"], ["--help"], ["-", "--json", "x"]])
def test_a_command_that_is_not_installed(monkeypatch, capsys, arguments) -> None:
    entry_points(monkeypatch)
    assert main(["migrate", *arguments]) == 2
    message = "replicax migrate: error: the command is not installed: pip install 'replicax[migrate]'\n"
    assert capsys.readouterr().err == message


def test_the_help_says_what_can_be_installed(monkeypatch, capsys) -> None:
    entry_points(monkeypatch)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "(pip install 'replicax[migrate]')" in " ".join(capsys.readouterr().out.split())


def test_a_command_of_another_distribution(monkeypatch, capsys) -> None:
    def add_parser(subparsers) -> None:
        parser = subparsers.add_parser("hello")
        parser.add_argument("name")
        parser.set_defaults(run=lambda args: print(f"hello {args.name}") or 7)

    monkeypatch.setitem(sys.modules, "hello_command", types.ModuleType("hello_command"))
    sys.modules["hello_command"].add_parser = add_parser
    entry_points(monkeypatch, importlib.metadata.EntryPoint("hello", "hello_command", "replicax.commands"))
    assert main(["hello", "world"]) == 7
    assert capsys.readouterr().out == "hello world\n"
