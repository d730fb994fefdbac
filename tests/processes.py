"""Runs test code in several real worker processes on this machine.

Write what a worker does as a function of a module below ``tests``, and call it from a test::

    # tests/strategies/workers_counting.py
    def count(start):
        strategy = replicax.MultiWorkerMirroredStrategy()
        ones = strategy.distribute_values_from_function(lambda ctx: 1.0)
        return start + float(strategy.reduce("sum", ones))


    # tests/strategies/test_counting.py
    def test_counting():
        assert processes.run(workers_counting.count, 10, workers=2, devices=2) == [14.0, 14.0]

``run`` returns what each worker returned, in their order (anything that can be pickled; no device arrays). In each
process there are ``devices`` emulated CPU devices (a list says how many in each), ``jax.distributed`` is initialised,
and a warning is an error. A worker that raises fails the test: the message has its
traceback and what it printed. Whatever is left after the deadline is killed, and shown.

Workers are forked from a process that has imported JAX (``tests/forked.py``). A launch still costs a second or two, so
they stay, and the next test with as many of the same kind finds them: a test that ends workers, leaves one behind, or
changes what belongs to a whole process asks for ``fresh=True``.

For programs that start JAX themselves, such as examples: ``run_programs([["examples/x.py", "--worker=0"], …])``
gives each a Python process, and returns what each printed; ``free_port()`` finds a port for the coordinator.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests import forked
from tests.compiler import HURRIED

ROOT = pathlib.Path(__file__).parent.parent
MODULE = "-W", "error", "-m"
"""What the arguments begin with of a program that is a module of the tests; its process is forked."""
GRACE = 4.0
"""How many seconds the others have to end, when one has failed."""


Running = subprocess.Popen[bytes] | forked.Process


class WorkersFailedError(AssertionError):
    """A worker process has failed, or did not end in time; the message has what it printed."""


def run(
    fn: Callable[..., Any],
    *args: Any,
    workers: int = 2,
    devices: int | Sequence[int] = 1,
    timeout: float = 60.0,
    fresh: bool = False,
) -> list[Any]:
    """``fn(*args)`` in each of several workers; see the module's docstring.

    Args:
      fn: a function of an importable module.
      args: what can be pickled.
      workers: how many processes.
      devices: how many CPU devices each has.
      timeout: after how many seconds they are killed.
      fresh: whether the processes are to be new, and used for nothing else.

    Raises:
      WorkersFailedError: a worker raised, died or did not end in time.
    """
    counts = (devices,) * workers if isinstance(devices, int) else tuple(devices)
    task = pickle.dumps((fn.__module__, fn.__qualname__, args))
    if fresh:
        with contextlib.closing(_Team(counts)) as team:
            results = team.run(task, timeout)
            team.end(timeout)
            return results
    if counts not in _teams:
        _teams[counts] = _Team(counts)
    try:
        return _teams[counts].run(task, timeout)
    except BaseException:
        _teams.pop(counts).close()
        raise


class _Team:
    """Worker processes that wait for something to do.

    Args:
      devices: how many CPU devices each has.
    """

    def __init__(self, devices: Sequence[int]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._done = 0
        address = f"127.0.0.1:{free_port()}"
        counts = ",".join(map(str, devices))
        self._processes, self._logs = _start(
            [[*MODULE, "tests.processes", address, counts, str(i)] for i in range(len(devices))],
            pathlib.Path(self._folder.name),
        )

    def run(self, task: bytes, timeout: float) -> list[Any]:
        """What each returns from a pickled task."""
        self._done += 1
        path = pathlib.Path(self._folder.name, f"task{self._done}")
        path.write_bytes(task)
        results = [path.with_name(f"result{self._done}-{i}") for i in range(len(self._processes))]
        for process, result in zip(self._processes, results, strict=True):
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has died, which the wait finds out
                process.stdin.write(f"{path}\n{result}\n".encode())
                process.stdin.flush()
        for pause in _pauses(self._processes, timeout):
            if all(result.exists() for result in results):
                return [pickle.loads(result.read_bytes()) for result in results]
            time.sleep(pause)
        raise _failure(self._processes, self._logs)

    def end(self, timeout: float) -> None:
        """Let the processes end, as they would by themselves."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        _wait(self._processes, self._logs, timeout)

    def close(self) -> None:
        """End the processes, however they are."""
        with contextlib.suppress(WorkersFailedError):
            self.end(GRACE)
        _kill(self._processes)
        self._folder.cleanup()


_teams: dict[tuple[int, ...], _Team] = {}


def close_all() -> None:
    """End the workers that have stayed; the tests are over."""
    while _teams:
        _teams.popitem()[1].close()
    forked.close()


def run_programs(
    programs: Sequence[Sequence[str]], *, timeout: float = 60.0, environment: Sequence[dict[str, str]] = ()
) -> list[str]:
    """Run Python programs at the same time, each in a process of its own.

    Args:
      programs: the arguments of each, after ``python``.
      timeout: after how many seconds they are killed.
      environment: variables to add, for each.

    Returns:
      What each printed, errors too.

    Raises:
      WorkersFailedError: one ended with an error, or not in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        running, logs = _start(programs, pathlib.Path(folder), environment=environment)
        try:
            _wait(running, logs, timeout)
        finally:
            _kill(running)
        return [log.read_text(errors="replace") for log in logs]


def _start(
    programs: Sequence[Sequence[str]], folder: pathlib.Path, *, environment: Sequence[dict[str, str]] = ()
) -> tuple[list[Running], list[pathlib.Path]]:
    """A Python process for each program, and where each prints to, in a folder."""
    clean = {k: v for k, v in os.environ.items() if k != "NPROC"}  # the tests' own devices
    clean |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": forked.import_path(), "PYTHONUNBUFFERED": "1", **HURRIED}
    logs = [folder / f"log{i}" for i in range(len(programs))]
    running: list[Running] = []
    for program, log, more in zip(programs, logs, environment or [{}] * len(programs), strict=True):
        if tuple(program[:3]) == MODULE:
            running.append(forked.start(program[3], program[4:], log, clean | more, folder))
            continue
        with log.open("wb") as out:
            running.append(
                subprocess.Popen(
                    [sys.executable, *program],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    cwd=ROOT,
                    env=clean | more,
                )
            )
    return running, logs


def _pauses(running: Sequence[Running], timeout: float) -> Iterator[float]:
    """Short pauses until the time is over; soon, once a process has failed."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if any(p.poll() for p in running):
            deadline = min(deadline, time.monotonic() + GRACE)
        yield 0.02


def _wait(running: Sequence[Running], logs: Sequence[pathlib.Path], timeout: float) -> None:
    """Wait until all have ended well."""
    for pause in _pauses(running, timeout):
        if all(p.poll() == 0 for p in running):
            return
        time.sleep(pause)
    raise _failure(running, logs)


def _kill(running: Sequence[Running]) -> None:
    for p in running:
        if p.poll() is None:
            p.kill()
        p.wait()


def _failure(running: Sequence[Running], logs: Sequence[pathlib.Path]) -> WorkersFailedError:
    """What is raised when processes have failed, or not ended in time; kills those that are left."""
    late = [p.poll() is None for p in running]
    _kill(running)
    texts = [log.read_text(errors="replace") for log in logs]
    return WorkersFailedError("\n".join(map(_report, range(len(running)), running, late, texts)))


def free_port() -> int:
    """A port of this machine that no program uses, and two calls hardly give the same."""
    from replicax.launcher import rendezvous

    return rendezvous.free_port("127.0.0.1")


def _report(worker: int, process: Running, late: bool, text: str) -> str:
    ended = "had not ended, and was killed" if late else f"ended with code {process.returncode}"
    lines = text.splitlines()
    left_out = [f"… {len(lines) - 150} lines …"] if len(lines) > 150 else []
    return "\n".join([f"--- worker {worker} {ended}, and printed:", *lines[:50], *left_out, *lines[50:][-100:]])


def _work(address: str, counts: Sequence[int], worker: int) -> None:
    """What a worker process does: the task of one line of its input, with its result where the next line says."""
    import importlib

    import jax

    import replicax

    replicax.use_cpu_devices(counts[worker])
    jax.distributed.initialize(address, len(counts), worker, initialization_timeout=60, heartbeat_timeout_seconds=60)
    while task := sys.stdin.readline().strip():
        result = pathlib.Path(sys.stdin.readline().strip())
        try:
            module, name, args = pickle.loads(pathlib.Path(task).read_bytes())
            fn: Any = importlib.import_module(module)
            for part in name.split("."):
                fn = getattr(fn, part)
            result.with_suffix(".part").write_bytes(pickle.dumps(fn(*args)))
            result.with_suffix(".part").rename(result)  # whole, or not there
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # without waiting for the others, as JAX would
    jax.distributed.shutdown()


if __name__ == "__main__":
    _work(sys.argv[1], [int(n) for n in sys.argv[2].split(",")], int(sys.argv[3]))
