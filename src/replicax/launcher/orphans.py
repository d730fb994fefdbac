"""Ends every process that a launch has started, even those whose parents have ended.

Each process of a launch has its random id in the environment (``REPLICAX_LAUNCH_ID``). Child processes inherit it, and
``/proc`` shows it. So processes with a session of their own, and those whose parents have ended, are found, too.

If the launcher itself is killed (SIGKILL, out of memory), two mechanisms replace it. The kernel ends each worker,
because the worker has asked for it (:func:`die_with_parent`). And the *guard*, a process that only waits for the end of
the launcher, ends everything that has the mark.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PATIENCE = 5.0


def die_with_parent() -> Callable[[], None]:
    """A function for a new process to call before its program: then the kernel ends the process when this one ends.

    Everything it needs is prepared here: between fork and exec little is safe.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before it was asked for
            os._exit(128 + signal.SIGKILL)

    return ask


def marked(launch_id: str) -> list[int]:
    """The remaining processes of a launch, except the caller's."""
    pids = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:  # ended, or another user's
            if launch_id.encode() in file.read():
                pids.append(int(name))
    return pids


def end_marked(launch_id: str) -> list[int]:
    """End all processes of a launch; returns those that can't be ended, as they wait for a device in the kernel."""
    deadline = time.monotonic() + _PATIENCE
    clean = 0
    while clean < 2:  # a process that is just starting another program shows no environment for a moment
        left = marked(launch_id)
        clean = 0 if left else clean + 1
        if left and time.monotonic() > deadline:
            return left
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.005)
    return []


class Guard:
    """A process that ends those of a launch if the launcher can't. Create it while this process has a single thread."""

    def __init__(self, launch_id: str) -> None:
        ours, self._end = os.pipe()
        self._process = os.fork()
        if self._process:
            os.close(ours)
            return
        try:
            self._keep_watch(ours, launch_id)
        finally:
            os._exit(0)

    @staticmethod
    def _keep_watch(pipe: int, launch_id: str) -> None:
        os.setsid()  # Ctrl-C does not reach it
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, signal.SIG_IGN)  # nor does a scheduler's signal to all processes of a job end it
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):  # who waits for the end of the launcher's output is not to wait for the guard
            os.dup2(nowhere, standard)
        os.dup2(pipe, 3)
        os.closerange(4, 256)
        if not os.read(3, 1):  # the other end has closed without a word: the launcher is gone
            end_marked(launch_id)

    def dismiss(self) -> None:
        """End the guard: the launch is over, and none of its processes is left."""
        with contextlib.suppress(BrokenPipeError):  # the guard was killed
            os.write(self._end, b".")
        os.close(self._end)
        os.waitpid(self._process, 0)
