"""What ends a program, or Ray under it: errors that say so, soon, and no process that is left; by programs on Ray."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
from typing import Any

import pytest

from tests import processes

ray = pytest.importorskip("ray")
psutil = pytest.importorskip("psutil")  # Ray brings it
pytestmark = pytest.mark.soak

WAIT = 300.0
PROGRAM = """
    import os, signal, time
    import replicax
    import ray, psutil

    strategy = replicax.ParameterServerStrategy(num_workers=1)
    coordinator = replicax.ClusterCoordinator(strategy)
    coordinator.schedule(os.getpid).fetch()
"""


def running(path: pathlib.Path, text: str, **environment: str) -> Any:
    path.write_text(textwrap.dedent(PROGRAM) + textwrap.dedent(text))
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, path], env=os.environ | environment, cwd=processes.ROOT, **pipes)


@pytest.mark.parametrize("process", ["raylet", "gcs_server"])
def test_a_program_whose_ray_has_ended_is_told_so(process: str, tmp_path: pathlib.Path) -> None:
    text = f"""
    coordinator.schedule(time.sleep, args=(1000,))
    here = psutil.Process().children(recursive=True)
    [needed] = [process for process in here if process.name() == "{process}"]
    needed.kill()
    try:
        coordinator.join()
    except replicax.errors.WorkerError as error:
        print("told:", error)
    coordinator.close()
    _, left = psutil.wait_procs(here, timeout=10)  # those that have been killed are gone in a moment
    print("left:", len(left))
    """
    program = running(tmp_path / "program.py", text)
    output, _ = program.communicate(timeout=WAIT)
    assert f"told: the coordinator can't go on: Ray has ended: its process {process}" in output, output
    assert "left: 0" in output, output


@pytest.mark.parametrize(
    "end", ["os.kill(needed, signal.SIGKILL)", "import ray; ray.shutdown()"], ids=["dies", "is shut down"]
)
def test_a_program_that_was_told_ends_quietly(end: str, tmp_path: pathlib.Path) -> None:
    text = f"""
    with strategy.scope():
        w = replicax.Variable(1.0, name="w")
    coordinator.schedule(lambda: w.assign_add(1.0)).fetch()
    [needed] = [one.pid for one in psutil.Process().children(recursive=True) if one.name() == "raylet"]
    coordinator.schedule(time.sleep, args=(1000,))
    {end}
    try:
        coordinator.join()
    except replicax.errors.WorkerError as error:
        print("told:", error)
    """
    program = running(tmp_path / "program.py", text)
    output, _ = program.communicate(timeout=WAIT)
    assert program.returncode == 0, output
    assert "told: the coordinator can't go on: Ray has" in output, output
    assert "Traceback" not in output, output


@pytest.mark.parametrize("what", ["schedule(lambda: bytes(1 << 28))", "schedule(len, args=(bytes(1 << 28),))"])
def test_what_has_no_room_is_an_error_of_its_function(what: str, tmp_path: pathlib.Path) -> None:
    text = f"""
    coordinator.{what}
    try:
        coordinator.join()
    except replicax.errors.WorkerError as error:
        print("told:", error)
    print("then:", coordinator.schedule(lambda: 3).fetch())
    coordinator.close()
    """
    small = {"RAY_local_fs_capacity_threshold": "0.0001"}  # there is no disk for what memory has no room for
    replaced = "from replicax.parameter_server import actors\nactors._OBJECT_STORE = 80 << 20\n"
    path = tmp_path / "program.py"
    path.write_text(replaced + textwrap.dedent(PROGRAM) + textwrap.dedent(text))
    ended = subprocess.run(
        [sys.executable, path], env=os.environ | small, cwd=processes.ROOT, capture_output=True, text=True, timeout=WAIT
    )
    assert "NoRoomError: Ray has no memory for the arguments or the result" in ended.stdout, ended.stdout + ended.stderr
    assert "then: 3" in ended.stdout, ended.stdout


def test_a_program_that_is_killed_leaves_no_server_and_no_worker(tmp_path: pathlib.Path) -> None:
    """Two processes of Ray's own, which have nothing of the program, take longer to see it."""
    text = "print('ready', flush=True); coordinator.schedule(time.sleep, args=(1000,)).fetch()"
    with running(tmp_path / "program.py", text) as program:
        while "ready" not in program.stdout.readline():
            assert program.poll() is None
        noted = [psutil.Process(program.pid), *psutil.Process(program.pid).children(recursive=True)]
        program.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + WAIT
    while len(left := psutil.wait_procs(noted, timeout=0.1)[1]) > 2 and time.monotonic() < deadline:
        pass
    assert len(left) <= 2


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_processes_that_are_killed_cost_nothing(mode: str) -> None:
    struck = [sys.executable, "-m", "tests.chaos.servers", "--workers", "6", "--servers", "4", "--mode", mode]
    ended = subprocess.run(struck, cwd=processes.ROOT, capture_output=True, text=True, timeout=3 * WAIT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
