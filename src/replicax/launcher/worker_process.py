"""One worker: its process, and how that has ended."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from replicax.exit_codes import EXIT_PREEMPTED

_SAID_BY_OTHERS = (signal.SIGABRT, signal.SIGTERM)
_MEANINGS = {
    signal.SIGKILL: ", perhaps because memory ran out",
    signal.SIGSEGV: ", a crash in compiled code",
    signal.SIGBUS: ", perhaps because shared memory or a disk ran out",
    signal.SIGILL: ", as this machine's processor lacks an instruction",
    signal.SIGABRT: ", by its own libraries: see what they print",
}


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a worker's process has ended.

    Attributes:
      worker: which.
      status: its exit code; the negative number of the signal, if a signal has ended it.
      seconds: how long it had run.
    """

    worker: int
    status: int
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether its program has come to its end."""
        return self.status == 0

    @property
    def is_preemption(self) -> bool:
        """Whether it was asked to leave, and has saved what it needs to go on."""
        return self.status == EXIT_PREEMPTED

    @property
    def is_killed(self) -> bool:
        """Whether a signal has ended it: from outside, or a crash."""
        return self.status < 0

    @property
    def exit_code(self) -> int:
        """What a shell says of it."""
        return 128 - self.status if self.is_killed else self.status

    @property
    def rank(self) -> int:
        """Which of several endings at the same time is the cause: the lowest.

        A worker that loses another one ends by an exception, or is aborted.
        """
        if self.is_preemption:
            return 0
        if self.is_killed:
            return 3 if -self.status in _SAID_BY_OTHERS else 1
        return 2

    def __str__(self) -> str:
        if self.is_preemption:
            return f"has left, to be started again (exit code {self.status})"
        if not self.is_killed:
            return f"has ended with exit code {self.status}"
        try:
            name = signal.Signals(-self.status).name
        except ValueError:
            name = "a real-time signal"
        meaning = next((text for signum, text in _MEANINGS.items() if signum == -self.status), "")
        return f"was ended by signal {-self.status} ({name}{meaning})"


class WorkerProcess:
    """A worker's process, in a session of its own.

    Its standard output and standard error are pipes, in ``output``; it has no standard input.

    Args:
      worker: which.
      command: what it runs.
      environment: its own.
      prepare: what it calls before its program.

    Raises:
      OSError: it can't be started.
    """

    def __init__(
        self, worker: int, command: Sequence[str], environment: Mapping[str, str], prepare: Callable[[], None]
    ) -> None:
        self.worker = worker
        self.ending: Ending | None = None
        self._since = time.monotonic()
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=prepare,  # safe, as the launcher has a single thread
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.output = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        for pipe in self.output.values():
            os.set_blocking(pipe.fileno(), False)

    @property
    def pid(self) -> int:
        """The number of its process, and of its group."""
        return self._process.pid

    def look(self) -> Ending | None:
        """How it has ended, if that was not known before; else ``None``."""
        if self.ending is not None or (status := self._process.poll()) is None:
            return None
        self.ending = Ending(self.worker, status, time.monotonic() - self._since)
        return self.ending

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to the worker itself: what it has started is for it to end."""
        if self.ending is None:
            self._process.send_signal(signum)

    def kill(self) -> None:
        """End it at once, with all of its group."""
        if self.ending is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
