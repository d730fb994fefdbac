"""Python processes that start at once: forked from one that has imported JAX, and has not used it.

Most of a small test in processes of its own would be the import of JAX, again and again. ``start`` is for programs that
are modules below ``tests``; what a user starts from a shell is started as the user would, and so is what has to have
settings of JAX in its environment, which JAX reads when it is imported.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import pathlib
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
_USED = (
    "grain",
    "numpy.testing",
    "optax",
    "replicax.backends",
    "replicax.checks.loss_scale.mistakes",
    "replicax.data.batches.global_batches",
    "replicax.data.same_dataset",
    "replicax.integrations",
    "replicax.launcher.rendezvous",
    "replicax.padding.examples",
)
"""What most steps and datasets load when they need it."""


class Process:
    """A process that has been forked; as far as it goes, as :class:`subprocess.Popen`.

    Attributes:
      stdin: what it reads.
      returncode: how it has ended; negative for a signal, ``None`` before.
    """

    def __init__(self, pid: int, status: pathlib.Path, stdin: int) -> None:
        self._pid = pid
        self._status = status
        self.stdin = os.fdopen(stdin, "wb")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """How it has ended; ``None`` as long as it runs."""
        if self.returncode is None and self._status.exists():
            self.returncode = int(self._status.read_text())
            self._status.unlink()
            with contextlib.suppress(BrokenPipeError):
                self.stdin.close()
        return self.returncode

    def wait(self) -> int:
        """Wait until it ends; returns how."""
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        """End it, whatever it does."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)


def start(
    module: str, arguments: Sequence[str], log: pathlib.Path, environment: Mapping[str, str], folder: pathlib.Path
) -> Process:
    """Run a module as a program, in which every warning is an error.

    Args:
      module: its name.
      arguments: those of the program.
      log: the file into which it prints.
      environment: all of its variables.
      folder: for what processes tell each other; it outlives them.
    """
    server, _ = _server()
    reads, writes = os.pipe()
    with log.open("wb") as out:
        request = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": str(folder),
        }
        line = json.dumps(request).encode()
        socket.send_fds(server, [len(line).to_bytes(4, "big")], [reads, out.fileno()])
        server.sendall(line)
    os.close(reads)
    pid = int.from_bytes(_received(server, 4), "big")
    return Process(pid, folder / f"status{pid}", writes)


def close() -> None:
    """End the process that others are forked from, and all that are left of them."""
    if _server.cache_info().currsize:
        connection, process = _server()
        connection.close()
        process.wait()
        _server.cache_clear()


def import_path() -> str:
    """``PYTHONPATH`` of other processes: this checkout, and whatever this one was given (a release of Keras, say)."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(ROOT / "src"), str(ROOT), *([given] if given else [])])


@functools.cache
def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    # A process that is to be forked has one thread.
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": import_path(), "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    return ours, process


def _received(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError("the process that starts others has ended")
        data += part
    return data


# --- the process that is forked -------------------------------------------------------------------------


def load_all() -> None:
    """Import what processes will need, so that not each of them has to; and leave it out of all their collections."""
    import replicax

    for name in replicax.__all__:  # the package loads them when they are used
        getattr(replicax, name)
    for module in _USED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork processes as they are asked for; what a forked one is to do, ``None`` when nobody asks any more."""
    from tests._jax.contexts import keep_contexts
    from tests._jax.executables import keep_executables

    keep_contexts()
    keep_executables()
    load_all()
    folders: dict[int, pathlib.Path] = {}
    wakes, wakened = os.pipe()
    os.set_blocking(wakened, False)
    signal.set_wakeup_fd(wakened)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting = selectors.DefaultSelector()  # `select` takes no files with large numbers
    for file in (connection, wakes):
        waiting.register(file, selectors.EVENT_READ)
    while True:
        ready = [key.fileobj for key, _ in waiting.select()]
        if wakes in ready:
            os.read(wakes, 1024)
            _note_ended(folders)
        if connection in ready:
            size, fds, _, _ = socket.recv_fds(connection, 4, 2)
            if not size:
                break
            request: dict[str, Any] = json.loads(_received(connection, int.from_bytes(size, "big")))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that JAX has threads: not before it is used
                pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                for end in (wakes, wakened):
                    os.close(end)
                connection.close()
                _become(request, *fds)
                return request
            folders[pid] = pathlib.Path(request["folder"])
            for fd in fds:
                os.close(fd)
            connection.sendall(pid.to_bytes(4, "big"))
    for pid in folders:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return None


def _note_ended(folders: dict[int, pathlib.Path]) -> None:
    while folders:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        path = folders.pop(pid) / f"status{pid}"
        with contextlib.suppress(FileNotFoundError):  # nobody wants to know any more
            path.with_suffix(".part").write_text(str(os.waitstatus_to_exitcode(status)))
            path.with_suffix(".part").rename(path)  # whole, or not there


def _become(request: dict[str, Any], stdin: int, out: int) -> None:
    """Be a process that has just been started."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for fd, number in ((stdin, 0), (out, 1), (out, 2)):
        os.dup2(fd, number)
    os.close(stdin)
    os.close(out)
    sys.stdin = os.fdopen(0, closefd=False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["", *request["arguments"]]
    warnings.resetwarnings()
    warnings.simplefilter("error")


if __name__ == "__main__":
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:  # a process that has been forked, which ends as any other
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
