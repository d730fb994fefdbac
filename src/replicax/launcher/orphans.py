"""Nothing of a launch outlives it: whatever its workers have started is found and ended, whoever its parent is now.

Each process of a launch has a mark in its environment, which processes inherit, and which can be read in ``/proc``. So
also those are found that have a session of their own, or whose parents have ended.

If the launcher itself is killed (SIGKILL, out of memory), two things take its place. The kernel ends each worker, as
that has asked for it (:func:`die_with_parent`). And the *guard*, a process that only waits for the launcher's end,
ends everything that has the mark.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable

from replicax.launcher.worker_environment import MARK

_PR_SET_PDEATHSIG = 1
_PATIENCE = 5.0


def die_with_parent() -> Callable[[], None]:
    """A function for a new process to call before its program, after which the kernel ends it when this process ends.

    What it needs is prepared here: between fork and exec little is safe.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before it was asked for
            os._exit(128 + signal.SIGKILL)

    return ask


def marked(launch_id: str) -> list[int]:
    """The processes of a launch that are still there, but for the caller's."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:  # ended, or somebody else's
            for variable in file.read().split(b"\0"):
                key, _, value = variable.partition(b"=")
                if key == MARK.encode() and launch_id.encode() in value.split(b"/"):
                    found.append(int(name))
                    break
    return found


def end_marked(launch_id: str) -> list[int]:
    """End all processes of a launch, those too that are started meanwhile.

    Returns:
      Those that can't be ended, as the kernel has them wait for a device.
    """
    deadline = time.monotonic() + _PATIENCE
    while left := marked(launch_id):
        if time.monotonic() > deadline:
            return left
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.005)
    return []


class Guard:
    """A process that ends those of a launch if the launcher can't. Make it while this process has a single thread.

    Args:
      launch_id: marks the processes of the launch.
    """

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
        os.setsid()  # Ctrl-C is not for it
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, signal.SIG_IGN)  # nor what a scheduler sends to all processes of a job
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):  # who waits for the end of the launcher's output is not to wait for the guard
            os.dup2(nowhere, standard)
        os.dup2(pipe, 3)
        os.closerange(4, 256)
        if not os.read(3, 1):  # the other end has closed without a word: the launcher is gone
            end_marked(launch_id)

    def dismiss(self) -> None:
        """The launch is over, and nothing of it is left."""
        os.write(self._end, b".")
        os.close(self._end)
        os.waitpid(self._process, 0)
