"""One worker: its process, and how that has ended."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from replicax.system.exit_codes import EXIT_PREEMPTED

_SAID_BY_OTHERS = (signal.SIGABRT, signal.SIGTERM)
_COUNTERS = Path("/proc/vmstat")
_MEANINGS = {
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
      kills: how many processes the kernel has killed meanwhile as memory ran out, on the whole machine; ``None`` if it
        doesn't say.
      hang: why it was taken for one that hangs, if it was; it has been killed for that.
      is_certain: whether it is known to be at fault; otherwise it is one of several that waited.
    """

    worker: int
    status: int
    seconds: float
    kills: int | None = None
    hang: str | None = None
    is_certain: bool = True

    @property
    def is_good(self) -> bool:
        """Whether its program has come to its end."""
        return self.status == 0

    @property
    def is_preemption(self) -> bool:
        """Whether it was asked to leave, and has saved what it needs to go on."""
        return self.status == EXIT_PREEMPTED

    @property
    def is_early_preemption(self) -> bool:
        """Whether it was asked to leave before it had anything to save: SIGTERM has ended it."""
        return self.status == -signal.SIGTERM

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
        if self.hang is not None:
            return f"hangs: {self.hang}"
        if self.is_preemption:
            return f"has left, to be started again (exit code {self.status})"
        if not self.is_killed:
            return f"has ended with exit code {self.status}"
        try:
            name = signal.Signals(-self.status).name
        except ValueError:
            name = "a real-time signal"
        return f"was ended by signal {-self.status} ({name}{self._meaning()})"

    def _meaning(self) -> str:
        """What the signal probably means."""
        if -self.status != signal.SIGKILL:
            return next((text for signum, text in _MEANINGS.items() if signum == -self.status), "")
        if self.kills == 0:
            return ", by another program: the kernel has not run out of memory"
        return ", perhaps because memory ran out" + (": the kernel has killed a process for that" if self.kills else "")


def _kills_for_memory() -> int | None:
    """How many processes the kernel has killed since its start as memory ran out, that of a container included."""
    try:
        counters = dict(line.split() for line in _COUNTERS.read_text().splitlines())
        return int(counters["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


class WorkerProcess:
    """A worker's process, in a session of its own.

    Its standard output and standard error are pipes, in ``output``; it has no standard input. It was started at
    ``since``, by ``time.monotonic``.

    Args:
      worker: which.
      command: what it runs.
      environment: its own.
      prepare: what it calls before its program, if anything.

    Raises:
      OSError: it can't be started.
    """

    def __init__(
        self, worker: int, command: Sequence[str], environment: Mapping[str, str], prepare: Callable[[], None] | None
    ) -> None:
        self.worker = worker
        self.ending: Ending | None = None
        self.since = time.monotonic()
        self._kills = _kills_for_memory()
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
        kills = None
        if status == -signal.SIGKILL and self._kills is not None and (now := _kills_for_memory()) is not None:
            kills = now - self._kills
        self.ending = Ending(self.worker, status, time.monotonic() - self.since, kills)
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
