"""What workers print: line by line with their worker, in files, on a terminal."""

from __future__ import annotations

import os
import pathlib
import pty
import subprocess
import time
from types import SimpleNamespace

from replicax.launcher import console
from replicax.launcher.log_files import LONGEST_LINE, LogFile, WorkerOutput
from tests.launcher.launches import COMMAND, ROOT, Launch, launched, said

PRINT = """
    import os, sys
    me = os.environ["JAX_PROCESS_ID"]
    for i in range(200):  # in pieces, so that a line is never written at once
        for piece in ("worker ", me, f" line {i} ", "x" * 50, "\\n"):
            os.write(1, piece.encode())
    for percent in range(0, 101, 10):
        sys.stderr.write(f"\\r{percent}% of {me}")
    sys.stderr.write("\\n")
    os.write(2, b"an error of " + me.encode() + b"\\n")
    os.write(1, b"no end")
"""


def test_lines_stay_whole_and_streams_apart(tmp_path) -> None:
    launch = launched(tmp_path, "--workers", "3", "--log-dir", "logs", "train.py", script=PRINT)
    assert launch.code == 0, launch.stderr
    out = launch.stdout.splitlines()
    for worker in range(3):
        lines = [f"worker {worker} line {i} {'x' * 50}" for i in range(200)]
        assert [line for line in out if line.startswith(f"[{worker}]")] == [
            f"[{worker}] {t}" for t in [*lines, "no end"]
        ]
        errors = [line for line in launch.stderr.splitlines() if line.startswith(f"[{worker}]")]
        assert errors == [f"[{worker}] 100% of {worker}", f"[{worker}] an error of {worker}"]
        kept = (tmp_path / "logs" / "attempt-0" / f"worker-{worker}.log").read_bytes().decode()
        bar = "".join(f"\r{percent}% of {worker}" for percent in range(0, 101, 10))
        assert set(kept.split("\n")) == {*lines, "no end", bar, f"an error of {worker}", ""}
    assert len(out) == 3 * 201
    assert any("output is kept in logs/attempt-0" in line for line in said(launch))
    assert "train on 3 worker(s)" in (tmp_path / "logs" / "launch.log").read_text()
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "logs").rglob("*")}
    assert modes == {0o600, 0o700}, "programs may print what is secret"


def test_a_choice_whose_output_is_shown(tmp_path) -> None:
    script = "import os; print('here', os.environ['JAX_PROCESS_ID'])"
    launch = launched(tmp_path, "--workers", "2", "--log-dir", "logs", "--show", "chief", "train.py", script=script)
    assert launch.stdout == "[0] here 0\n"
    assert (tmp_path / "logs/attempt-0/worker-1.log").read_text() == "here 1\n"
    launch = launched(tmp_path, "--workers", "2", "--log-dir", "logs", "--show", "none", "train.py", script=script)
    assert launch.stdout == ""
    assert (tmp_path / "logs/attempt-0/worker-1.log").read_text() == "here 1\nhere 1\n"  # files are added to


def test_an_unfinished_line_is_kept_while_its_worker_goes_on(tmp_path) -> None:
    script = """
        import os, time
        os.write(2, b"compiling ...")
        while not os.path.exists("go"):
            time.sleep(0.01)
        os.write(2, b" done\\n")
    """
    kept = tmp_path / "logs/attempt-0/worker-0.log"
    with Launch(tmp_path, "--workers", "1", "--log-dir", "logs", "train.py", script=script) as launch:
        launch.wait_until(lambda: kept.exists() and kept.read_text() == "compiling ...")
        assert "compiling" not in launch.stderr
        (tmp_path / "go").touch()
        assert launch.wait() == 0
        assert "[0] compiling ... done\n" in launch.stderr
    assert kept.read_text() == "compiling ... done\n"


def test_on_a_terminal_progress_bars_move_below_coloured_lines(tmp_path) -> None:
    script = """
        import os, sys, time
        me = os.environ["JAX_PROCESS_ID"]
        print(os.environ["COLUMNS"])
        for i in range(3):
            sys.stderr.write(f"\\rstep {i} {'=' * 200}")
            while not os.path.exists(f"seen{i}"):
                time.sleep(0.01)
        print("a line")
        sys.stderr.write("\\rall steps\\n")
    """
    master, terminal = pty.openpty()
    os.set_blocking(master, False)
    with Launch(tmp_path, "--workers", "1", "train.py", script=script, stdout=terminal, TERM="xterm") as launch:
        os.close(terminal)
        seen = b""
        while True:
            is_over = launch.process.poll() is not None
            try:
                seen += os.read(master, 1 << 16)
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # the other end is closed
                break
            for i in range(3):
                if b"step %d ===" % i in seen:
                    (tmp_path / f"seen{i}").touch()
            if is_over and not seen.endswith(b"\n"):
                time.sleep(0.01)
        assert launch.wait() == 0
    os.close(master)
    prefix = b"\x1b[36m[0]\x1b[0m "
    assert b"\r\x1b[K" + prefix + b"step 0 ===" in seen
    assert prefix + b"a line\r\n" + prefix + b"step" in seen  # and the bar again below it
    assert prefix + b"all steps\r\n" in seen
    drawn = [part for part in seen.split(b"\r") if b"step 0" in part]
    assert all(part.count(b"=") < 80 for part in drawn)  # cut, so that it stays one line
    assert b"[0]\x1b[0m 75\r\n" in seen  # what the prefix and the cursor leave of 80 columns


def test_files_have_every_byte_of_lines_that_are_too_long_to_show(tmp_path) -> None:
    script = f"""
        import os
        os.write(1, b"a" * {3 * LONGEST_LINE} + b"\\n")
        for i in range({LONGEST_LINE // 4}):
            os.write(1, b"\\rbar %06d" % i)
    """
    launch = launched(tmp_path, "--workers", "1", "--log-dir", "logs", "train.py", script=script)
    assert launch.code == 0, launch.stderr
    kept = (tmp_path / "logs/attempt-0/worker-0.log").read_bytes()
    bars = b"".join(b"\rbar %06d" % i for i in range(LONGEST_LINE // 4))
    assert kept == b"a" * (3 * LONGEST_LINE) + b"\n" + bars + b"\n"
    assert launch.stdout.splitlines()[-1] == f"[0] bar {LONGEST_LINE // 4 - 1:06}"
    assert max(map(len, launch.stdout.splitlines())) <= 2 * LONGEST_LINE + len("[0] ")


def test_a_launch_goes_on_when_the_disk_is_full(capfd) -> None:
    file = LogFile(pathlib.Path("/dev/full"), console.Console(1, None))
    for _ in range(2):
        file.write(b"a line\n")
    file.close()
    told = "[launch] /dev/full can't be written any more (No space left on device); the launch goes on without it\n"
    assert capfd.readouterr().err == told


def test_of_several_progress_bars_the_first_workers_is_shown(capfd, monkeypatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda number: True)
    monkeypatch.setenv("NO_COLOR", "1")
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    shown = console.Console(3, None)

    def drawn() -> str:
        return capfd.readouterr().err.removeprefix("\r\x1b[K")

    shown.unfinished(1, "stderr", b"\rbar 1")
    assert drawn() == "[1] bar 1"
    shown.unfinished(2, "stderr", b"\rbar 2")
    assert drawn() == ""
    shown.unfinished(0, "stderr", b"\rbar 0")
    assert drawn() == "[0] bar 0"
    shown.line(0, "stderr", b"\rbar 0\rready\n")
    assert drawn() == "[0] ready\n"
    shown.unfinished(2, "stderr", b"\rbar 2")
    assert drawn() == "[2] bar 2"
    shown.unfinished(1, "stderr", b"\rbar 1")
    now[0] = 10.0  # nothing of worker 1 for a while
    shown.unfinished(2, "stderr", b"\rbar 2!")
    assert drawn().endswith("[2] bar 2!")


def test_a_launch_without_standard_streams_works(tmp_path) -> None:
    (tmp_path / "train.py").write_text("print('here')")
    subprocess.run(
        ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "-", *COMMAND, "--workers", "2", "--log-dir", "logs", "train.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        check=True,
        timeout=60,
    )
    assert (tmp_path / "logs/attempt-0/worker-1.log").read_text() == "here\n"
    assert "train on 2 worker(s)" in (tmp_path / "logs/launch.log").read_text()


def test_when_nobody_reads_the_output_any_more_the_workers_go_on(tmp_path) -> None:
    reading, writing = os.pipe()
    script = "for i in range(1000): print(i)\nopen('finished', 'w').close()"
    with Launch(tmp_path, "--workers", "1", "--log-dir", "logs", "train.py", script=script, stdout=writing) as launch:
        os.close(writing)
        os.close(reading)
        assert launch.wait() == 0
    assert (tmp_path / "finished").exists()
    assert (tmp_path / "logs/attempt-0/worker-0.log").read_text().splitlines()[-1] == "999"


def test_a_line_without_an_end_does_not_fill_the_memory() -> None:
    shown: list[bytes] = []
    kept: list[bytes] = []
    file = SimpleNamespace(write=kept.append, close=lambda: None)
    console = SimpleNamespace(line=lambda *line: shown.append(line[2]), unfinished=lambda *line: None)
    output = WorkerOutput(1, file, console)
    for i in range(3 * LONGEST_LINE // 10):  # a bar that is never finished
        output.add("stderr", b"\rbar %06d" % i)
    assert shown == []
    assert output._open["stderr"].endswith(b"\rbar %06d" % i)
    assert len(output._open["stderr"]) <= LONGEST_LINE
    for _ in range(30):
        output.add("stdout", b"x" * (LONGEST_LINE // 10))
    assert [set(line) for line in shown] == [set(b"x")] * 2
    output.close()
    assert b"".join(kept).count(b"bar") == 3 * LONGEST_LINE // 10
    assert b"".join(kept).count(b"x") == 30 * (LONGEST_LINE // 10)
    output = WorkerOutput(1, file, console)
    output.add("stdout", b"x" * (LONGEST_LINE + 1))
    output.close()
    assert kept[-1] == b"\n"
