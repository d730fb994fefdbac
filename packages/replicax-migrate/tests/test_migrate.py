"""``replicax migrate``: what it reads, what it prints, and how it ends."""

from __future__ import annotations

import ast
import errno
import io
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from replicax.cli import main
from replicax_migrate import uses
from replicax_migrate.uses import find_uses
from tensorflow_programs import STRATEGY, TF


def test_what_is_printed(tmp_path: pathlib.Path, capsys) -> None:
    path = tmp_path / "p.py"
    path.write_text(f"{STRATEGY}s.run(f)\ns.run(g)\ns.unwrap(x)\n")
    assert main(["migrate", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        f"{path}:2:5  tf.distribute.MirroredStrategy → replicax.MirroredStrategy; without devices"
    )
    assert lines[1].startswith(f"{path}:3:1  s.run → s.run; the Python of a step runs once")
    assert lines[2] == f"{path}:4:1  s.run → s.run"  # what differs is said once
    assert lines[3].startswith(f"{path}:5:1  s.unwrap → strategy.local_results(value)")
    assert lines[4] == (
        "4 uses of 3 names in 1 file: 3 with a name of today, 1 to be changed by hand. --write can rename 1."
    )
    assert path.read_text().startswith(STRATEGY)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("print(1)\n", 0),
        (STRATEGY, 0),
        (f"{TF}tf.tpu.experimental.initialize_tpu_system()\n", 0),
        (f"{TF}tf.distribute.Server(x)\n", 1),
        ("def f(:\n", 1),
        ("print 'hello'\n", 1),
        ("x = '\0'\n", 1),
        ("# coding: no-such-code\n", 1),
    ],
)
def test_exit_status(tmp_path: pathlib.Path, capsys, text: str, status: int) -> None:
    path = tmp_path / "p.py"
    path.write_bytes(text.encode())
    assert main(["migrate", str(path)]) == status


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", r"line 1: is no Python \(invalid syntax\)"),
        ("print 'hello'\n", "line 1: is Python 2; convert it to Python 3 first"),
        ("try:\n    f()\nexcept E, e:\n    pass\n", "is Python 2"),
        ("raise E, 'x'\n", "is Python 2"),
        ("x = 0777\n", "is Python 2"),
        ("x = `y`\n", "is Python 2"),
        ("# `word` <> 0777\ndef f(:\n", "line 2: is no Python"),
        ("x = = '`word` <>'  # `word`\n", "line 1: is no Python"),
        ("# coding: undefined\n", "is not text in UTF-8, or in the encoding that it names"),
        ("# coding: no-such-code\n", "is not text in UTF-8, or in the encoding that it names"),
        ("x = 'ü'\n".encode("latin-1"), "is not text in UTF-8, or in the encoding that it names"),
        ("(" * 2000, "is no Python"),
    ],
)
def test_files_that_are_no_programs(tmp_path: pathlib.Path, capsys, text: str | bytes, message: str) -> None:
    path = tmp_path / "p.py"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    (tmp_path / "q.py").write_text(STRATEGY)
    assert main(["migrate", str(tmp_path)]) == 1  # the others are read all the same
    captured = capsys.readouterr()
    assert re.search(rf"p.py: .*{message}", captured.err), captured.err
    assert captured.err.count("\n") == 1
    assert "q.py:2:5" in captured.out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.py", "there is no file"),
        ("notes.txt/none.py", "there is no file"),
        ("notes.txt", "is neither a Python file"),
        (f"{'x' * 300}.py", "can't be read (File name too long)"),
    ],
)
def test_wrong_arguments(tmp_path: pathlib.Path, capsys, name: str, message: str) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert main(["migrate", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_an_empty_argument_is_not_the_current_folder(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    (tmp_path / "p.py").write_text(STRATEGY)
    monkeypatch.chdir(tmp_path)
    assert main(["migrate", "--write", ""]) == 2
    assert "argument FILE: must name a file, got an empty string" in capsys.readouterr().err
    assert (tmp_path / "p.py").read_text() == STRATEGY


@pytest.mark.parametrize("report", ["p.py", "new.ipynb", "link.json"])
def test_a_report_does_not_take_the_place_of_a_program(tmp_path: pathlib.Path, capsys, report: str) -> None:
    (tmp_path / "p.py").write_text(STRATEGY)
    (tmp_path / "link.json").symlink_to(tmp_path / "p.py")
    assert main(["migrate", "--json", str(tmp_path / report), str(tmp_path / "p.py")]) == 2
    assert f"{report}: can't be written (it is a program, or has the name of one)" in capsys.readouterr().err
    assert (tmp_path / "p.py").read_text() == STRATEGY
    assert not (tmp_path / "new.ipynb").exists()


def test_standard_input(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(STRATEGY.encode())))
    assert main(["migrate", "-"]) == 0
    assert capsys.readouterr().out.startswith("<stdin>:2:5  tf.distribute.MirroredStrategy → replicax.Mirr")
    assert main(["migrate", "-", "--write"]) == 2
    assert "--write can't change standard input; name a file" in capsys.readouterr().err


def test_nobody_reads_the_output(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "p.py"
    path.write_text(STRATEGY)
    program = "import sys; from replicax.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "migrate", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait(timeout=100)) == (b"", 141)


def test_an_encoding_without_arrows(tmp_path: pathlib.Path, monkeypatch) -> None:
    (tmp_path / "p.py").write_text(STRATEGY)
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert main(["migrate", str(tmp_path)]) == 0
    assert rb"tf.distribute.MirroredStrategy \u2192 replicax.Mirr" in out.buffer.getvalue()


def test_one_file_of_many_is_bad(tmp_path: pathlib.Path, capsys) -> None:
    (tmp_path / "empty.py").touch()
    (tmp_path / "good.py").write_text(STRATEGY)
    (tmp_path / "bad.py").write_bytes(b"x = '\xff'\n")
    assert main(["migrate", "--write", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "bad.py: is not text in UTF-8" in captured.err
    assert "1 use of 1 name in 2 files" in captured.out
    assert (tmp_path / "good.py").read_text() == f"import replicax\n{STRATEGY.replace('tf.distribute', 'replicax')}"
    assert (tmp_path / "empty.py").read_bytes() == b""


def test_a_file_that_is_nested_too_deeply_does_not_end_the_command(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    (tmp_path / "p.py").write_text(STRATEGY)
    (tmp_path / "q.py").write_text(f"{STRATEGY}s.run(f)\n")

    def find(tree: ast.Module, lines: list[str]) -> list[uses.NameUse]:
        if len(tree.body) == 2:
            raise RecursionError("maximum recursion depth exceeded")
        return find_uses(tree, lines)

    monkeypatch.setattr(uses, "find_uses", find)
    assert main(["migrate", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "p.py: maximum recursion depth exceeded" in captured.err
    assert "q.py:2:5" in captured.out


def test_the_exit_statuses_are_in_the_help(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["migrate", "--help"])
    text = capsys.readouterr().out.partition("Exit status:")[2]
    assert re.findall(r"(\d)\s+if\b", text) == ["0", "1", "2", "3"]


def test_folders_and_json(tmp_path: pathlib.Path, capsys) -> None:
    for name in ("a.py", "inner/b.py", "inner/__pycache__/c.py", ".hidden/d.py", "inner/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(STRATEGY)
    report = tmp_path / "report.json"
    assert main(["migrate", str(tmp_path), str(tmp_path / "a.py"), "--json", str(report)]) == 0
    assert "2 uses of 1 name in 2 files: 2 with a name of today" in capsys.readouterr().out
    data = json.loads(report.read_text())
    assert [use["place"] for use in data] == [f"{tmp_path}/a.py:2:5", f"{tmp_path}/inner/b.py:2:5"]
    assert data[0]["today"] == "replicax.MirroredStrategy"
    assert data[0]["status"] == "name"
    assert main(["migrate", str(tmp_path / "a.py"), "--json", str(tmp_path / "no" / "report.json")]) == 2


def test_folders_that_can_not_be_read_are_named(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    (tmp_path / "p.py").write_text(STRATEGY)
    (tmp_path / "locked").mkdir()
    scandir = os.scandir

    def scan(folder: str) -> object:
        if str(folder).endswith("locked"):
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", scan)
    assert main(["migrate", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"replicax migrate: {tmp_path}/locked: can't be read (Permission denied)\n"
    assert "p.py:2:5" in captured.out


@pytest.mark.parametrize("name", [".#p.py", "._p.py", "pipe.py"])
def test_what_is_no_program_in_a_folder_is_skipped(tmp_path: pathlib.Path, capsys, name: str) -> None:
    if name == "pipe.py":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("nowhere")
    assert main(["migrate", str(tmp_path)]) == 0
    assert "in 0 files" in capsys.readouterr().out


def test_names_of_files_that_are_no_text(tmp_path: pathlib.Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.py")
    path.write_text(STRATEGY)
    report = tmp_path / "report.json"
    assert main(["migrate", "--json", str(report), str(path)]) == 0
    assert json.loads(report.read_text())[0]["place"] == f"{path}:2:5"


def notebook(*cells: str) -> str:
    kinds = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    return json.dumps({"cells": [{"cell_type": "markdown", "source": "# Title"}, *kinds], "nbformat": 4})


def test_notebooks(tmp_path: pathlib.Path, capsys) -> None:
    path = tmp_path / "n.ipynb"
    path.write_text(
        notebook(
            "!pip install tensorflow\n%matplotlib inline\nimport tensorflow as tf",
            "strategy = tf.distribute.MirroredStrategy()\nif x:\n  !ls \\\n   -l\nprint('%d'\n  %(3))",
            "%%bash\nstrategy.run this",
            "%%writefile main.py\nstrategy.run(f)\ntf.distribute?",
            "this is no Python",
            "  x = 1\n  strategy.scope()\n",
        )
    )
    before = path.read_bytes()
    assert main(["migrate", "--write", str(path)]) == 1
    captured = capsys.readouterr()
    places = [line.partition("  ")[0] for line in captured.out.splitlines()[:-1]]
    assert places == [f"{path}[cell 2]:1:12", f"{path}[cell 4]:2:1", f"{path}[cell 6]:2:1"]
    assert "n.ipynb: cell 5: line 1: is no Python" in captured.err
    assert "a notebook, which --write leaves alone" in captured.err
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("cell", "place"),
    [
        ("%time s.experimental_run_v2(f)", "1:7"),
        ("if x:\n  %timeit -n 1 -r3 -q s.experimental_run_v2(f)", "2:23"),
        ("%time y = s.experimental_run_v2(f)\nz = y", "1:11"),
        ("%time for x in y: f(x)\ns.experimental_run_v2(f)", "2:1"),
        ("\n  \n%%time\ns.experimental_run_v2(f)", "4:1"),
        ("files, a[0].n = !ls\ns.experimental_run_v2(f)", "2:1"),
        ("if x:\n  !ls \\\n    a\n  s.experimental_run_v2(f)", "4:3"),
        ("print('''\nloss = %d''' % x)\ns.experimental_run_v2(f)", "3:1"),
    ],
)
def test_what_only_notebooks_understand(tmp_path: pathlib.Path, capsys, cell: str, place: str) -> None:
    path = tmp_path / "n.ipynb"
    path.write_text(notebook(cell))
    assert main(["migrate", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    [use, summary] = captured.out.splitlines()
    assert use.startswith(f"{path}[cell 1]:{place}  s.experimental_run_v2 → s.run")
    assert summary == "1 use of 1 name in 1 file: 1 with a name of today."  # which --write leaves alone


@pytest.mark.parametrize("text", ["{", "[]", '{"cells": [{}]}', '{"worksheets": []}'])
def test_what_is_no_notebook(tmp_path: pathlib.Path, capsys, text: str) -> None:
    path = tmp_path / "n.ipynb"
    path.write_text(text)
    assert main(["migrate", str(path)]) == 1
    assert "is not a notebook of version 4" in capsys.readouterr().err
