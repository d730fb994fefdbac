"""What ``replicax migrate --write`` changes in programs, and what it leaves alone."""

from __future__ import annotations

import os
import pathlib
import stat

import pytest

from replicax.cli import main
from replicax_migrate import rewriting
from replicax_migrate.source_files import UnreadableError, read_program
from tensorflow_programs import GET, STRATEGY, TF, TOWERS, written_into


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"{TF}s = tf.distribute.get_strategy()\n",
         f"import replicax\n{TF}s = replicax.get_strategy()\n"),
        (f"'''Doc.'''\nfrom __future__ import annotations\nimport os\n{TF}tf.distribute.ReduceOp.SUM",
         f"'''Doc.'''\nfrom __future__ import annotations\nimport os\nimport replicax\n{TF}replicax.ReduceOp.SUM"),
        (f"try:\n    {TF}except ImportError:\n    tf = None\nx = tf.VariableSynchronization.ON_READ\n",
         f"import replicax\ntry:\n    {TF}except ImportError:\n    tf = None\nx = replicax.Synchronization.ON_READ\n"),
        (f"import replicax\n{TF}tf.distribute.get_strategy()\n",
         f"import replicax\n{TF}replicax.get_strategy()\n"),
        ("x.experimental_run_v2(f)  # ä\r\ny = 'é'; x.experimental_run_v2(g)\r\n",
         "x.run(f)  # ä\r\ny = 'é'; x.run(g)\r\n"),
        ("import tensorflow as tf\r\nx\t= tf.distribute . Strategy\r\ntf.distribute.Strategy\r\n",
         "import replicax\r\nimport tensorflow as tf\r\nx\t= tf.distribute . Strategy\r\nreplicax.Strategy\r\n"),
        (f"{TF}x = (tf.distribute\n     .get_strategy())\n",
         f"{TF}x = (tf.distribute\n     .get_strategy())\n"),
        (f"{TF}s = tf.distribute.get_strategy()\nz = (s\n     .experimental_local_results(x))\n",
         f"import replicax\n{TF}s = replicax.get_strategy()\nz = (s\n     .local_results(x))\n"),
        (f"def f():\n    {TF}    return tf.distribute.get_strategy()\n",
         f"import replicax\ndef f():\n    {TF}    return replicax.get_strategy()\n"),
        (f"{TF}if old:\n    tf = tf.compat.v2\ntf.distribute.get_strategy()\n",
         f"import replicax\n{TF}if old:\n    tf = tf.compat.v2\nreplicax.get_strategy()\n"),
        (f"{TF}replicax = 1\ntf.distribute.get_strategy()\n",
         f"{TF}replicax = 1\ntf.distribute.get_strategy()\n"),
        (f"{TF}s = tf.distribute.get_strategy()\ns.num_towers_per_host; s.make_dataset_iterator(d)\n",
         f"import replicax\n{TF}s = replicax.get_strategy()\ns.num_towers_per_host; s.make_dataset_iterator(d)\n"),
    ],
)  # fmt: skip
def test_only_names_that_are_sure_are_written(before: str, after: str) -> None:
    assert written_into(before) == after
    assert written_into(after) == after


FUTURE = "from __future__ import annotations"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"'''D'''; {FUTURE}; {TF}", f"'''D'''; {FUTURE}; import replicax; {TF}"),
        (f"{FUTURE}; {TF}", f"{FUTURE}; import replicax; {TF}"),
        (f"'''D'''; {TF}", f"'''D'''; import replicax; {TF}"),
        (f"'''D\nü'''; {TF}", f"'''D\nü'''; import replicax; {TF}"),
        (f"'''D'''\n{FUTURE}; {TF}", f"'''D'''\n{FUTURE}; import replicax; {TF}"),
        (f"'''D'''; {FUTURE}\n{TF}", f"'''D'''; {FUTURE}\nimport replicax\n{TF}"),
        (f"'''D'''; import os\n{TF}", f"'''D'''; import replicax; import os\n{TF}"),
        (f"import os; {TF}", f"import replicax\nimport os; {TF}"),
    ],
)
@pytest.mark.parametrize("separator", ["\n", "; "])
def test_the_import_comes_early_enough_and_not_too_early(before: str, after: str, separator: str) -> None:
    """Also where a statement that must come first shares its line with others."""
    program = f"{before.rstrip()}{separator}s = tf.distribute.get_strategy()\nprint(s)\n"
    written = f"{after.rstrip()}{separator}s = replicax.get_strategy()\nprint(s)\n"
    compile(program, "program.py", "exec")
    compile(written, "program.py", "exec")
    assert written_into(program) == written
    assert written_into(written) == written


def test_a_name_that_two_stars_may_have_brought_stays() -> None:
    brought = "from tensorflow.distribute import *\nget_strategy()\n"
    assert written_into(brought).endswith("\nreplicax.get_strategy()\n")
    assert written_into(f"from mine import *\n{brought}") == f"from mine import *\n{brought}"


@pytest.mark.parametrize(
    "text",
    [
        "class Own:\n    def experimental_run_v2(self, f): ...\nother.experimental_run_v2(f)\n",
        "class Own:\n    experimental_run_v2 = run\nother.experimental_run_v2(f)\n",
        f"{TF}class Own(tf.keras.Model):\n    def experimental_run_v2(self): ...\ns.experimental_run_v2(f)\n",
        "other.experimental_run_v2 = fake\nother.experimental_run_v2(f)\n",
        f"{TF}tf.distribute.get_strategy = fake\ns = tf.distribute.get_strategy()\n",
        f"{TF}del tf.distribute.get_strategy\n",
        f"{TF}tf = load()\ns = tf.distribute.get_strategy()\n",
        f"{TF}try:\n    pass\nexcept E as tf:\n    s = tf.distribute.get_strategy()\n",
        f"{TF}def f(*tf):\n    s = tf.distribute.get_strategy()\n",
        f"{TF}match x:\n    case [*tf]:\n        s = tf.distribute.get_strategy()\n",
        f"if tensorflow:\n    {TF}    d = tf.distribute\nelse:\n    import torch.distributed as d\nd.ReduceOp.SUM\n",
        "try:\n    import tensorflow.distribute as d\nexcept E:\n    import torch.distributed as d\nd.ReduceOp.SUM\n",
        f"{TF}class A:\n    def f(self): self.d = tf.distribute\n"
        "class B:\n    def f(self): self.d = torch.distributed; self.d.ReduceOp.SUM\n",
        f"{TF}class A:\n    d = tf.distribute\n    def f(self): self.d = torch.distributed; self.d.ReduceOp.SUM\n",
        f"{TF}d = tf.distribute if x else torch.distributed\nd.ReduceOp.SUM\n",
        f"{TF}d = torch.distributed or tf.distribute\nd.ReduceOp.SUM\n",
        f"{TF}def f(d): d.ReduceOp.SUM\nf(tf.distribute)\nf(torch.distributed)\n",
        f"{TF}def f():\n    if x:\n        return tf.distribute\n    return torch.distributed\nf().ReduceOp.SUM\n",
    ],
)
def test_what_is_perhaps_something_else_stays(text: str) -> None:
    assert written_into(text) == text


@pytest.mark.parametrize(
    "own",
    [
        "import other as replicax\n",
        "import replicax.errors as replicax\n",
        "from other import replicax\n",
        "def f(replicax): ...\n",
        "def f(*replicax): ...\n",
        "def f():\n    def replicax(): ...\n",
        "class replicax: ...\n",
        "try:\n    pass\nexcept E as replicax:\n    pass\n",
        "for replicax in x: ...\n",
    ],
)
def test_a_replicax_of_the_programs_own(own: str, tmp_path: pathlib.Path, capsys) -> None:
    path = tmp_path / "program.py"
    path.write_text(GET + own)
    assert main(["migrate", "--write", str(path)]) == 0
    assert path.read_text() == GET + own
    assert "program.py: has a replicax of its own, so --write leaves it alone" in capsys.readouterr().err


def test_a_program_that_would_not_compile_is_not_written(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(GET)
    with pytest.raises(UnreadableError, match="with the new names line 2 would not compile"):
        rewriting.write_program(read_program(path), "s = 1\nreturn\n")
    assert path.read_text() == GET


def test_towers_are_written_as_compat() -> None:
    after = written_into(TOWERS)
    assert after.startswith(f"import replicax.compat.v1\n{TF}")
    assert "d = replicax.compat.v1.MirroredStrategy(num_gpus=2)" in after
    assert "d.reduce(replicax.compat.v1.VariableAggregation.SUM, x, x)" in after
    changed = [new for old, new in zip(TOWERS.splitlines(), after.splitlines()[1:], strict=True) if old != new]
    assert len(changed) == 3
    assert written_into(after) == after


@pytest.mark.parametrize(
    "raw",
    [
        "\ufeffimport tensorflow as tf\r\ntf.distribute.get_strategy()  # ü\r\n".encode(),
        f"# -*- coding: latin-1 -*-\n{TF}x = 'ü'; tf.distribute.get_strategy()".encode("latin-1"),
        b"import tensorflow as tf\n\x0c\ndef f():\n\ttf.distribute.get_strategy() \n\n\n",
        b"import tensorflow as tf\rtf.distribute.get_strategy()\r",
    ],
)  # fmt: skip
def test_all_else_stays_byte_for_byte(tmp_path: pathlib.Path, raw: bytes) -> None:
    path = tmp_path / "program.py"
    path.write_bytes(raw)
    path.chmod(0o640)
    link = tmp_path / "link.py"
    link.symlink_to(path)
    assert main(["migrate", "--write", str(link)]) == 0
    after = path.read_bytes()
    assert after.replace(b"import replicax\r\n", b"").replace(b"import replicax\n", b"").replace(
        b"import replicax\r", b""
    ) == raw.replace(b"tf.distribute.get_strategy", b"replicax.get_strategy")
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["link.py", "program.py"]
    assert main(["migrate", "--write", str(link)]) == 0
    assert path.read_bytes() == after


@pytest.mark.parametrize("more", ["x = (y" + "\n .add(1)" * 1000 + ")\n", "x = y" + " + y" * 2000 + "\n"])
def test_long_expressions_are_no_hindrance(tmp_path: pathlib.Path, more: str) -> None:
    path = tmp_path / "program.py"
    path.write_text(GET + more)
    assert main(["migrate", "--write", str(path)]) == 0
    assert path.read_text() == f"import replicax\n{TF}s = replicax.get_strategy()\n{more}"


def test_warnings_of_a_program_are_its_own(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(f"{GET}x = 1 is 1\n")
    assert main(["migrate", "--write", str(path)]) == 0  # in tests a warning is an error


@pytest.mark.parametrize(
    ("encoding", "more"),
    [("cp932", b"x = '\xee\xf9'\n"), ("unicode_escape", b"x = '\\x61'\n"), ("utf-7", b"x = '+AGE-'\n")],
)
def test_a_file_whose_other_bytes_would_change_is_left_alone(
    tmp_path: pathlib.Path, capsys, encoding: str, more: bytes
) -> None:
    path = tmp_path / "program.py"
    path.write_bytes(raw := f"# coding: {encoding}\n{GET}".encode() + more)
    assert main(["migrate", "--write", str(path)]) == 3
    assert f"can't be written (in {encoding} some characters have several codes" in capsys.readouterr().err
    assert path.read_bytes() == raw


def test_a_file_is_written_whole_or_not_at_all(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    path = tmp_path / "program.py"
    path.write_text(STRATEGY)

    def fails(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rewriting.os, "replace", fails)
    assert main(["migrate", "--write", str(path)]) == 3
    assert "program.py: can't be written (No space left on device)" in capsys.readouterr().err
    assert path.read_text() == STRATEGY
    assert os.listdir(tmp_path) == ["program.py"]


def test_a_file_that_may_not_be_written_is_left_alone(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    path = tmp_path / "program.py"
    path.write_text(STRATEGY)
    monkeypatch.setattr(rewriting.os, "access", lambda *args: False)
    assert main(["migrate", "--write", str(path)]) == 3
    assert "can't be written (Permission denied)" in capsys.readouterr().err
    assert path.read_text() == STRATEGY


def test_a_file_that_has_changed_meanwhile_is_left_alone(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(STRATEGY)
    program = read_program(path)
    path.write_text("print(1)\n")
    with pytest.raises(UnreadableError, match="has changed"):
        rewriting.write_program(program, "print(2)\n")
    assert path.read_text() == "print(1)\n"
