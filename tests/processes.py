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
traceback and what it printed. Whatever is left after the deadline is killed, and shown. A launch costs two to three
seconds, so put many checks into one.

For programs that start JAX themselves, such as examples: ``run_programs([["examples/x.py", "--worker=0"], …])``
gives each a Python process, and returns what each printed; ``free_port()`` finds a port for the coordinator.
"""

from __future__ import annotations

import os
import pathlib
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
GRACE = 4.0
"""How many seconds the others have to end, when one has failed."""


class WorkersFailedError(AssertionError):
    """A worker process has failed, or did not end in time; the message has what it printed."""


def run(
    fn: Callable[..., Any], *args: Any, workers: int = 2, devices: int | Sequence[int] = 1, timeout: float = 60.0
) -> list[Any]:
    """``fn(*args)`` in each of several workers; see the module's docstring.

    Args:
      fn: a function of an importable module.
      args: what can be pickled.
      workers: how many processes.
      devices: how many CPU devices each has.
      timeout: after how many seconds they are killed.

    Raises:
      WorkersFailedError: a worker raised, died or did not end in time.
    """
    counts = [devices] * workers if isinstance(devices, int) else list(devices)
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        task = pathlib.Path(folder, "task")
        task.write_bytes(pickle.dumps((fn.__module__, fn.__qualname__, args, address, counts)))
        results = [pathlib.Path(folder, f"result{i}") for i in range(workers)]
        run_programs(
            [["-W", "error", "-m", "tests.processes", str(task), str(i), str(results[i])] for i in range(workers)],
            timeout=timeout,
        )
        return [pickle.loads(result.read_bytes()) for result in results]


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
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    clean = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}  # the tests' own devices
    clean |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder, f"log{i}") for i in range(len(programs))]
        running = []
        for program, log, more in zip(programs, logs, environment or [{}] * len(programs), strict=True):
            with log.open("wb") as out:
                running.append(
                    subprocess.Popen([sys.executable, *program], stdout=out, stderr=out, cwd=ROOT, env=clean | more)
                )
        deadline = time.monotonic() + timeout
        try:
            while any(p.poll() is None for p in running) and time.monotonic() < deadline:
                if any(p.poll() for p in running):
                    deadline = min(deadline, time.monotonic() + GRACE)
                time.sleep(0.02)
        finally:
            late = [p.poll() is None for p in running]
            for p in running:
                if p.poll() is None:
                    p.kill()
                p.wait()
        texts = [log.read_text(errors="replace") for log in logs]
        if any(p.returncode for p in running):
            raise WorkersFailedError("\n".join(map(_report, range(len(programs)), running, late, texts)))
        return texts


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _report(worker: int, process: subprocess.Popen[bytes], late: bool, text: str) -> str:
    ended = "had not ended, and was killed" if late else f"ended with code {process.returncode}"
    lines = text.splitlines()
    left_out = [f"… {len(lines) - 150} lines …"] if len(lines) > 150 else []
    return "\n".join([f"--- worker {worker} {ended}, and printed:", *lines[:50], *left_out, *lines[50:][-100:]])


def _work(task: str, worker: int, result: str) -> None:
    """What a worker process does."""
    module, name, args, address, counts = pickle.loads(pathlib.Path(task).read_bytes())
    import importlib

    import jax

    import replicax

    replicax.use_cpu_devices(counts[worker])
    jax.distributed.initialize(address, len(counts), worker, initialization_timeout=60, heartbeat_timeout_seconds=60)
    try:
        fn: Any = importlib.import_module(module)
        for part in name.split("."):
            fn = getattr(fn, part)
        returned = fn(*args)
        pathlib.Path(result).write_bytes(pickle.dumps(returned))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # without waiting for the others, as JAX would
    jax.distributed.shutdown()


if __name__ == "__main__":
    _work(sys.argv[1], int(sys.argv[2]), sys.argv[3])
