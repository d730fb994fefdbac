"""Wrong input: one line that says what to change, and nothing is started."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest

from replicax.cli import main
from tests.launcher.launches import COMMAND, ROOT

HERE = socket.gethostname()


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    """A folder with a program that would leave a file behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    (tmp_path / "train.py").write_text("open('started', 'w').close()")
    (tmp_path / "notes.txt").write_text("not a program")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    return tmp_path


def refused(capsys, *words: str) -> str:
    """What is said of a launch that is not made."""
    assert main(["launch", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert not pathlib.Path("started").exists()
    assert shown.err.count("\n") == 1
    return shown.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.py"], "the following arguments are required: --workers"),
        (["--workers", "0", "train.py"], "argument --workers: expected N or N:MAX with 1 <= N <= MAX < 65536, got '0'"),
        (["--workers", "4:2", "train.py"], "expected N or N:MAX with 1 <= N <= MAX < 65536, got '4:2'"),
        (["--workers", "9" * 20, "train.py"], f"expected N or N:MAX with 1 <= N <= MAX < 65536, got '{'9' * 20}'"),
        (["--workers", "two", "train.py"], "got 'two'"),
        (["--workers", "2"], "expected a script, or -m and a module, after the options"),
        (["--workers", "2", "-m"], "-m: expected the name of a module after it"),
        (
            ["--workers", "2", "--worker", "3", "train.py"],
            "unrecognized arguments: --worker (see replicax launch --help)",
        ),
        (["--workers", "2", "no.py"], "there is no file no.py in "),
        (["--workers", "2", "package"], "package is a folder: expected a Python file, or -m and a module"),
        (["--workers", "2", "notes.txt"], "notes.txt is neither a Python file (its name does not end in .py) nor exec"),
        (["--workers", "2", "-m", "no_such.train"], "there is no module 'no_such' here"),
        (["--workers", "2", "-m", "package.no"], "there is no module 'package.no' here"),
        (["--workers", "2", "-m", "package"], "'package' is a package without a __main__"),
        (["--workers", "2", "--devices-per-worker", "0", "train.py"], "must be at least 1, got 0"),
        (["--workers", "2", "--max-restarts", "-1", "train.py"], "--max-restarts"),
        (["--workers", "2", "--grace", "-1", "train.py"], "--grace must be a number of seconds, 0 or more, got -1"),
        (["--workers", "2", "--grace", "nan", "train.py"], "--grace must be a number of seconds, 0 or more, got nan"),
        (["--workers", "2", "--backoff", "soon", "train.py"], "argument --backoff: invalid float value: 'soon'"),
        (["--workers", "2", "--finish-timeout", "0", "train.py"], "--finish-timeout must be a positive number"),
        (["--workers", "2", "--port", "70000", "train.py"], "must be from 1 to 65535, got 70000"),
        (["--workers", "2", "--bind", "192.0.2.1", "train.py"], "the chief can't listen at 192.0.2.1:"),
        (["--workers", "2", "--node-rank", "1", "train.py"], "--node-rank is for several hosts"),
        (["--workers", "2", "--hosts", "a b,c", "train.py"], "expected names or addresses with commas in between"),
        (["--workers", "2", "--hosts", f"{HERE},b", "train.py"], "2 hosts need --port, the same on all"),
        (["--workers", "2", "--hosts", "a.no,b.no", "train.py"], f"this machine is named {HERE}, which is none of"),
        (["--workers", "2", "--hosts", f"{HERE},{HERE}", "train.py"], "which is number 0 and number 1 of --hosts"),
        (["--workers", "2", "--hosts", "a,b", "--node-rank", "2", "train.py"], "--node-rank 2: expected 0 to 1"),
        (["--workers", "1:2", "--hosts", "a,b", "--node-rank", "1", "train.py"], "can change on a single machine only"),
        (
            ["--workers", "2", "--hosts", "a,b", "--node-rank", "1", "--max-restarts", "2", "train.py"],
            "one launcher can't start the workers of other hosts again",
        ),
        (
            ["--workers", "2", "--hosts", "192.0.2.1,b", "--node-rank", "0", "--port", "7001", "train.py"],
            "this machine is number 0 of --hosts, 192.0.2.1: correct it, or say with --bind where it listens",
        ),
        (
            ["--workers", "2", "--hosts", "127.0.0.1,b", "--node-rank", "0", "--port", "7001", "train.py"],
            "127.0.0.1 is a loopback address here, and the other 1 host(s) can't reach it",
        ),
        (
            ["--workers", "2", "--hosts", "127.0.0.1,b", "--node-rank", "1", "--port", "7001", "train.py"],
            "127.0.0.1 is a loopback address here, and this host can't reach the chief there",
        ),
        (["--workers", "2", "--log-dir", "notes.txt", "train.py"], "--log-dir notes.txt: there is a file of that name"),
        (
            ["--workers", "2", "--log-dir", "/proc/logs", "train.py"],
            "--log-dir /proc/logs: nothing can be written ther",
        ),
        (["--workers", "2", "--gpus", "2", "train.py"], "--gpus is for --sbatch and --jobset"),
        (["--workers", "2", "--sbatch", "--jobset", "train.py"], "not allowed with argument"),
        (["--workers", "2", "--sbatch", "--image", "i", "train.py"], "--image is for --jobset"),
        (["--workers", "2", "--sbatch", "--time", "soon", "train.py"], "expected a duration such as 30:00"),
        (["--workers", "2", "--sbatch", "--time", "0", "train.py"], "a duration of more than 0 seconds"),
        (["--workers", "2", "--sbatch", "--name", "a b", "train.py"], "a job of Slurm needs a name without blanks"),
        (["--workers", "2", "--sbatch", "it's.py"], "a job of Slurm needs a name without blanks, quotes, /, # and %"),
        (["--workers", "2", "--sbatch", "--out", "train.py", "train.py"], "(it is a program, or has the name of one)"),
        (["--workers", "2", "--sbatch", "--out", "/dev/full", "train.py"], "/dev/full: can't be written (No space"),
        (["--workers", "2", "--sbatch", "--hosts", "a,b", "train.py"], "the hosts of a job are those that it is given"),
        (["--workers", "1:2", "--sbatch", "--nodes", "2", "train.py"], "can change on a single machine only"),
        (
            ["--workers", "4", "--devices-per-worker", "2", "--sbatch", "--gpus", "4", "train.py"],
            "--workers 4 with 2 GPU(s) each need 8 GPUs, and there are 4 (--gpus 4)",
        ),
        (
            ["--workers", "16", "--sbatch", "--nodes", "2", "--gpus", "8", "train.py"],
            "--workers 16 with 1 GPU(s) each need 16 GPUs, and there are 8 (--gpus 8). --workers counts those of one",
        ),
        (["--workers", "3", "--jobset", "--image", "i", "--gpus", "8", "train.py"], "can't be divided evenly among 3"),
        (["--workers", "2", "--jobset", "train.py"], "--jobset needs --image, the container to run in"),
        (["--workers", "2", "--jobset", "--name", "A_b", "train.py"], "a JobSet needs a name of small letters"),
        (["--workers", "2", "--jobset", "--image", "i", "--name", "a" * 60, "train.py"], "so short that"),
        (
            ["--workers", "2", "--jobset", "--image", "i", "--nodes", "9" * 16, "train.py"],
            "Kubernetes runs at most 100,000 pods",
        ),
        (
            ["--workers", "2", "--sbatch", "--out", "package", "train.py"],
            "--out package: can't be written (it is a folder)",
        ),
    ],
    ids=lambda value: "-".join(w.strip("-") for w in value)[:60] if isinstance(value, list) else "",
)
def test_wrong_input(folder, capsys, words, message) -> None:
    assert message in refused(capsys, *words)


def test_a_package_that_is_installed_to_be_edited_is_found(folder, tmp_path_factory, monkeypatch, capsys) -> None:
    """It has a finder of its own, and its folder is not in ``sys.path``."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "train.py").touch()

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None) -> ModuleSpec | None:
            found = ModuleSpec(name, None, is_package=True)
            found.submodule_search_locations = [str(elsewhere)]
            return found if name == "mine" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert main(["launch", "--workers", "1", "--dry-run", "-m", "mine.train"]) == 0
    capsys.readouterr()
    assert "there is no module 'mine.no' here" in refused(capsys, "--workers", "2", "-m", "mine.no")


def test_an_operating_system_that_is_not_linux(folder, capsys, monkeypatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity")
    with monkeypatch.context() as context:
        isdir = os.path.isdir
        context.setattr("os.path.isdir", lambda path: path != "/proc/self" and isdir(path))
        assert "the launcher needs Linux: it finds" in refused(capsys, "--workers", "2", "train.py")
    assert main(["launch", "--workers", "2", "--dry-run", "train.py"]) == 0


def test_gpus_that_are_not_there(folder, capsys, monkeypatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    said = refused(capsys, "--workers", "2", "--devices-per-worker", "2", "train.py")
    assert "--workers 2 with 2 GPU(s) each need 4 GPUs, and there are 2 (0, 1)" in said


def test_a_port_in_use(folder, capsys) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused(capsys, "--workers", "2", "--port", str(port), "train.py")
        assert f"port {port} of 127.0.0.1 is in use by another program: choose another --port" in said


def test_a_disk_without_room_for_the_output(folder) -> None:
    """A limit of the size of files fails as a full disk does: where one writes."""
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 1; exec "$@"', "-", *COMMAND, "--workers", "2", "--log-dir", "logs", "train.py"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "replicax launch: error: --log-dir logs: nothing can be written there (File too large); name another folder\n"
    )
    assert not (folder / "started").exists()
    assert list((folder / "logs").iterdir()) == []


def test_a_program_that_the_kernel_does_not_know(folder) -> None:
    program = folder / "odd"
    program.write_bytes(b"\x00\x01\x02")
    program.chmod(0o755)
    done = subprocess.run(
        [*COMMAND, "--workers", "2", "odd"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "a worker can't be started: [Errno 8] Exec format error: './odd'" in done.stderr
