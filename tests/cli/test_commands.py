"""Commands of other distributions, found by their entry points; interrupts of commands, and commands in threads."""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.metadata
import os
import subprocess
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


@pytest.mark.parametrize("command", [[], ["demo"], ["plan"], ["launch"], ["doctor"], ["env"], ["migrate"]])
def test_the_help_fits_the_terminal(monkeypatch, capsys, command) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80  # an example keeps its lines
    assert all(len(line) <= 72 for line in lines if not line.startswith("    "))


def test_a_command_of_another_distribution(monkeypatch, capsys) -> None:
    def add_parser(subparsers) -> None:
        as_it_is = argparse.RawDescriptionHelpFormatter
        parser = subparsers.add_parser("hello", epilog="a line\nanother", formatter_class=as_it_is)
        parser.add_argument("name")
        parser.set_defaults(run=lambda args: print(f"hello {args.name}") or 7)

    monkeypatch.setitem(sys.modules, "hello_command", types.ModuleType("hello_command"))
    sys.modules["hello_command"].add_parser = add_parser
    entry_points(monkeypatch, importlib.metadata.EntryPoint("hello", "hello_command", "replicax.commands"))
    assert main(["hello", "world"]) == 7
    assert capsys.readouterr().out == "hello world\n"
    with pytest.raises(SystemExit):
        main(["hello", "--help"])
    assert capsys.readouterr().out.endswith("\na line\nanother\n")


def begins(subparsers) -> None:
    subparsers.add_parser("hello", help="says hello")
    raise RuntimeError("no\n100%")


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        (None, "ModuleNotFoundError: No module named 'hello_command'"),
        ({}, "AttributeError: module 'hello_command' has no attribute 'add_parser'"),
        ({"add_parser": begins}, "RuntimeError: no 100%"),
    ],
)
def test_a_command_that_can_not_be_loaded_is_an_error_only_for_itself(monkeypatch, capsys, parts, why) -> None:
    if parts is not None:
        monkeypatch.setitem(sys.modules, "hello_command", types.ModuleType("hello_command"))
        vars(sys.modules["hello_command"]).update(parts)
    names = "hello", "plan"  # of which the second is Replicax's
    entry_points(monkeypatch, *(importlib.metadata.EntryPoint(n, "hello_command", "replicax.commands") for n in names))
    assert main(["hello", "--help"]) == 2
    error = "replicax hello: error: the command can't be loaded from hello_command of another distribution: "
    assert capsys.readouterr().err == f"{error}{why}\n"
    assert main(["plan", "nowhere.py"]) == 2
    assert "nowhere.py" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "can't be loaded from another distribution" in shown
    assert "says hello" not in shown


def test_a_command_in_a_thread(capsys) -> None:
    with concurrent.futures.ThreadPoolExecutor() as threads:
        assert threads.submit(main, ["plan", "nowhere.py"]).result() == 2
    assert "nowhere.py" in capsys.readouterr().err


# As native code does, which is interrupted while it is loaded.
INTERRUPTED = """\
import signal
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt as error:
    raise ImportError("Encountered an error while initializing the extension.") from error
"""


@pytest.mark.parametrize(
    ("module", "text", "command"),
    [
        ("fractions.py", "import signal; signal.raise_signal(signal.SIGINT)", ["env"]),  # which the commands import
        ("jax.py", INTERRUPTED, ["plan", "plan.py"]),
        ("jax.py", INTERRUPTED, ["demo"]),
        ("jax.py", INTERRUPTED, ["doctor"]),
    ],
)
def test_an_interrupt_while_a_command_imports_its_code(tmp_path, module, text, command) -> None:
    (tmp_path / module).write_text(text)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "replicax", *command],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
