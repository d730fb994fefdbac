"""One worker: its process, and how that ended."""

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
    """The end of a worker's process."""

    worker: int  # its number
    status: int  # its exit code; the negative number of the signal, if a signal ended it
    seconds: float  # for which it ran
    # How many processes on the whole machine the kernel killed meanwhile as memory ran out; ``None`` if it doesn't say.
    kills: int | None = None
    is_certain: bool = True  # whether it is known to be at fault, rather than one of several that waited

    @property
    def is_good(self) -> bool:
        """Return whether its program reached its end."""
        return self.status == 0

    @property
    def is_preemption(self) -> bool:
        """Return whether it was asked to leave, and has saved its state."""
        return self.status == EXIT_PREEMPTED

    @property
    def is_early_preemption(self) -> bool:
        """Return whether it was asked to leave before it had anything to save: SIGTERM ended it."""
        return self.status == -signal.SIGTERM

    @property
    def is_killed(self) -> bool:
        """Return whether a signal ended it: from outside, or by a crash."""
        return self.status < 0

    @property
    def exit_code(self) -> int:
        """Its exit code, as a shell reports it."""
        return 128 - self.status if self.is_killed else self.status

    @property
    def rank(self) -> int:
        """Orders endings at the same time: the lowest is the cause.

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
        return f"was ended by signal {-self.status} ({name}{self._meaning()})"

    def _meaning(self) -> str:
        """The probable meaning of the signal."""
        if -self.status != signal.SIGKILL:
            return next((text for signum, text in _MEANINGS.items() if signum == -self.status), "")
        if self.kills == 0:
            return ", by another program: the kernel has not run out of memory"
        return ", perhaps because memory ran out" + (": the kernel has killed a process for that" if self.kills else "")


def _kills_for_memory() -> int | None:
    """Count the processes that the kernel has killed because memory ran out, those in containers included."""
    try:
        counters = dict(line.split() for line in _COUNTERS.read_text().splitlines())
        return int(counters["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


class WorkerProcess:
    """A worker's process, in a session of its own.

    Its standard output and standard error are pipes, in ``output``; it has no standard input. It was started at
    ``since``, by ``time.monotonic``. Raises an OSError if it can't be started.
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
        """The id of its process, and of its process group."""
        return self._process.pid

    def look(self) -> Ending | None:
        """Return how the process ended, if this is new; else ``None``."""
        if self.ending is not None or (status := self._process.poll()) is None:
            return None
        kills = None
        if status == -signal.SIGKILL and self._kills is not None and (now := _kills_for_memory()) is not None:
            kills = now - self._kills
        self.ending = Ending(self.worker, status, time.monotonic() - self.since, kills)
        return self.ending

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to the worker alone, which has to end the processes that it has started."""
        if self.ending is None:
            self._process.send_signal(signum)

    def kill(self) -> None:
        """Kill it at once, with its process group."""
        if self.ending is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
