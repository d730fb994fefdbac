"""One attempt: starts, watches and ends all workers together."""

from __future__ import annotations

import dataclasses
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from replicax.launcher.console import Console
from replicax.launcher.log_files import LogFile, WorkerOutput
from replicax.launcher.orphans import die_with_parent, end_marked
from replicax.launcher.settings import LaunchSettings
from replicax.launcher.signal_inbox import RESIZING, STOPPING, SignalInbox
from replicax.launcher.watchdog.hang_watch import Hang, HangWatch
from replicax.launcher.worker_process import Ending, WorkerProcess
from replicax.system.quantities import counted

FAULT_PATIENCE = 0.3
"""Seconds that the other workers have to end after one has failed: they can do nothing without it."""
CAUSE_PATIENCE = 10.0
"""Seconds that a worker whose Python ended first has to end its process, after that of another one has failed."""
NOTICE = 60.0
"""After how many seconds the launcher names the workers that finished ones wait for; then after twice as many, etc."""
UNKILLABLE = 20.0
"""After how many seconds the launcher gives up on a killed process that is still there."""
_TICK = 0.1
"""Seconds between two looks at the deadlines, at most."""
_LOOK = 0.25
"""Seconds between two looks at unfinished lines and at workers that may hang, at least."""
_PIECE = 1 << 16


@dataclasses.dataclass(frozen=True)
class AttemptResult:
    """The result of an attempt."""

    endings: tuple[Ending, ...]  # of all workers
    cause: Ending | None = None  # the ending that caused the others, of a fault or a preemption
    stop: signal.Signals | None = None  # the signal that ended the launch
    resize: int = 0  # the change of the number of workers

    @property
    def has_finished(self) -> bool:
        """Return whether all workers have finished."""
        return all(ending.is_good for ending in self.endings)

    @property
    def is_preempted(self) -> bool:
        """Return whether a worker was asked to leave, and the others ended with it."""
        return self.cause is not None and (self.cause.is_preemption or self.cause.is_early_preemption)


class Attempt:
    """All workers, from their start to the end of the last.

    ``environments`` are those of this machine's workers, by their numbers among all ``count`` workers of all hosts.
    """

    def __init__(
        self,
        settings: LaunchSettings,
        environments: Mapping[int, Mapping[str, str]],
        count: int,
        folder: Path,
        launch_id: str,
        console: Console,
        say: Callable[[str], None],
        inbox: SignalInbox,
    ) -> None:
        self._settings, self._launch_id = settings, launch_id
        self._environments, self._count, self._folder = environments, count, folder
        self._console, self._say, self._inbox = console, say, inbox
        self._workers: list[WorkerProcess] = []
        self._outputs: dict[int, WorkerOutput] = {}
        self._selector = selectors.DefaultSelector()
        self._faults: list[Ending] = []
        self._cause: Ending | None = None
        self._stop: signal.Signals | None = None
        self._resize = 0
        self._ending_since: float | None = None
        self._end_at: float | None = None
        self._kill_at: float | None = None
        self._give_up_at: float | None = None
        self._looked_at = 0.0
        self._finished_at: float | None = None
        self._failed_at: float | None = None
        self._notice_after = NOTICE
        self._watch = HangWatch(settings.hang_timeout, settings.is_alone, say)

    def run(self) -> AttemptResult:
        """Start the workers, and wait until all have ended; none of their processes is left then.

        Raises:
          OSError: one can't be started. Those that were started have been ended.
        """
        self._selector.register(self._inbox, selectors.EVENT_READ)
        try:
            self._start()
            while self._alive() and (self._give_up_at is None or time.monotonic() < self._give_up_at):
                self._wait()
        finally:
            self._clear_away()
        if self._cause is not None and self._stop is None and not self._cause.is_preemption:
            self._show_cause(self._cause)
        return self._result()

    # --- starting -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        prepare = die_with_parent()
        for number, environment in self._environments.items():
            environment = {**environment, **self._watch.variables(number)}
            worker = WorkerProcess(number, self._settings.program.command, environment, prepare)
            self._workers.append(worker)
            file = LogFile(self._folder / f"worker-{number}.log", self._console)
            self._outputs[number] = WorkerOutput(number, file, self._console)
            for stream, pipe in worker.output.items():
                self._selector.register(pipe, selectors.EVENT_READ, (number, stream))

    # --- watching -------------------------------------------------------------------------------------------

    def _alive(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker.ending is None]

    def _wait(self) -> None:
        for key, _ in self._selector.select(_TICK):
            if key.data is not None:
                self._read_output(key.fileobj, *key.data)
        for signum in self._inbox.read():
            self._obey(signum)
        # Don't count on one SIGCHLD for each: the kernel merges signals of a kind.
        ended = [ending for worker in self._workers if (ending := worker.look()) is not None]
        for ending in sorted(ended, key=lambda e: e.rank):
            self._note(ending)
        self._find_cause()
        now = time.monotonic()
        if now - self._looked_at >= _LOOK:
            self._looked_at = now
            for output in self._outputs.values():
                output.keep_unfinished()
            if self._ending_since is None:
                hang = self._watch.look({worker.worker: worker.pid for worker in self._alive()})
                if hang is not None:
                    self._note_hang(hang)
        self._meet_deadlines()

    def _read_output(self, pipe: Any, worker: int, stream: Any) -> bool:
        """Read a piece of a worker's output; returns whether there was one."""
        piece = pipe.read(_PIECE)
        if piece:
            self._outputs[worker].add(stream, piece)
            return True
        if piece == b"":  # not None, which means "not yet"
            self._selector.unregister(pipe)
            pipe.close()
        return False

    def _obey(self, signum: signal.Signals) -> None:
        grace = self._settings.grace
        if signum in STOPPING:
            if self._stop is not None:
                if signum == signal.SIGINT:  # the user does not want to wait
                    self._say("interrupted again: ending all workers at once")
                    self._kill_at = time.monotonic()
                return
            self._stop = signum
            again = "; interrupt again (Ctrl-C) to end them at once" if signum == signal.SIGINT else ""
            self._say(f"{signum.name}: the workers have {grace:g} s to end{again}")
            # Ctrl-C means to a worker what it would without a launcher; other signals ask it to save and leave.
            self._end_others(signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM, grace)
        elif signum in RESIZING and self._ending_since is None:
            wanted = len(self._workers) + RESIZING[signum]
            if not self._settings.least <= wanted <= self._settings.workers:
                self._say(
                    f"{signum.name}: there are {len(self._workers)} workers, and --workers {self._settings.least}:"
                    f"{self._settings.workers} does not allow {wanted}; nothing is changed"
                )
                return
            self._resize = RESIZING[signum]
            workers = counted(wanted, "worker")
            self._say(f"{signum.name}: going on with {workers}; those running have {grace:g} s to save and end")
            self._end_others(signal.SIGTERM, grace)

    def _note(self, ending: Ending) -> None:
        """A worker has ended."""
        if ending.is_good:
            self._finished_at = self._finished_at or time.monotonic()
        elif self._ending_since is None:
            self._faults.append(ending)
            self._failed_at = self._failed_at or time.monotonic()

    def _find_cause(self) -> None:
        """Find the ending that caused the others: that of the worker whose Python ended first.

        Its process may end last: the others raise a :class:`replicax.errors.WorkerError`, and the chief waits for them.
        """
        if self._failed_at is None or self._ending_since is not None:
            return
        ended = self._watch.ended
        first = min(self._faults, key=lambda fault: (fault.rank, ended(fault.worker)))
        is_awaited = any(0 < ended(worker.worker) < ended(first.worker) for worker in self._alive())
        if not is_awaited or time.monotonic() >= self._failed_at + CAUSE_PATIENCE:
            self._blame(first)

    def _blame(self, ending: Ending) -> None:
        """End the other workers, as this ending is the cause."""
        self._cause = ending
        others = len(self._alive())
        who = f"worker {ending.worker} of {self._count} on {socket.gethostname()} {ending}"
        if ending.is_preemption:
            self._say(f"{who}" + (f"; the others have {self._settings.grace:g} s to follow" if others else ""))
            self._end_others(None, self._settings.grace)
        elif ending.is_early_preemption:  # the launcher did not send the signal, and the others don't know of it
            self._say(f"{who}: it was asked to leave, and is to be started again; ending all others")
            self._end_others(signal.SIGTERM, FAULT_PATIENCE)
        else:
            then = "; ending all others" if others else ""
            self._say(f"{who}, {ending.seconds:.1f} s after its start{then}")
            self._end_others(signal.SIGTERM, FAULT_PATIENCE)

    def _note_hang(self, hang: Hang) -> None:
        """Name the workers that hang and why, let them print their stacks, and then end all."""
        now = time.monotonic()
        for status in hang.workers:
            why = f"{hang.why}, for {status.seconds:.1f} s, {status.where}"
            if self._cause is None:
                process = next(worker for worker in self._workers if worker.worker == status.worker)
                age = now - process.since
                self._cause = Ending(status.worker, -signal.SIGKILL, age, is_certain=hang.is_certain)
            self._say(f"worker {status.worker} of {self._count} on {socket.gethostname()} hangs: {why}")
        seconds = self._watch.ask_for_stacks(hang)
        then = "the stacks of its threads follow" if seconds else "it can't show its stacks"
        others = "; ending all others" if len(self._alive()) > 1 else ""
        self._say(f"{then}{others}")
        self._ending_since = self._end_at = now + seconds

    # --- ending ---------------------------------------------------------------------------------------------

    def _end_others(self, signum: signal.Signals | None, patience: float) -> None:
        """Ask all remaining workers to end, and kill them after ``patience`` seconds."""
        now = time.monotonic()
        self._ending_since = self._ending_since or now
        self._kill_at = now + patience
        if signum is not None:
            for worker in self._alive():
                worker.send(signum)

    def _meet_deadlines(self) -> None:
        now = time.monotonic()
        if self._end_at is not None and now >= self._end_at:
            self._end_at = None
            self._end_others(signal.SIGTERM, FAULT_PATIENCE)
        if self._kill_at is not None and now >= self._kill_at:
            late = self._alive()
            after_fault = self._cause is not None and not self._cause.is_preemption and self._stop is None
            if late and not after_fault:
                names = ", ".join(str(worker.worker) for worker in late)
                self._say(f"worker(s) {names} have not ended in time, and are killed")
            for worker in late:
                worker.kill()
            self._kill_at, self._give_up_at = None, now + UNKILLABLE
        if self._finished_at is None or self._ending_since is not None or not self._alive():
            return
        waited, limit = now - self._finished_at, self._settings.finish_timeout
        if limit is not None and waited >= limit:
            self._say(f"{self._waiting(waited)}: --finish-timeout {limit:g} is over, ending all")
            first = self._alive()[0]
            self._cause = Ending(first.worker, 1, now - first.since)
            self._end_others(signal.SIGTERM, FAULT_PATIENCE)
        elif waited >= self._notice_after:
            self._say(self._waiting(waited))
            self._notice_after *= 2

    def _waiting(self, seconds: float) -> str:
        gone = ", ".join(str(worker.worker) for worker in self._workers if worker.ending is not None)
        left = ", ".join(str(worker.worker) for worker in self._alive())
        return f"worker(s) {gone} have finished, the first {seconds:.0f} s ago, and worker(s) {left} have not"

    def _clear_away(self) -> None:
        """End everything that is left of this attempt."""
        for worker in self._workers:
            worker.kill()
        stuck = end_marked(self._launch_id)
        if stuck:
            self._say(f"the kernel does not end the processes {stuck}, which wait for a device or a file system")
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                while self._read_output(key.fileobj, *key.data):
                    pass
        for worker in self._workers:
            worker.look()
            for pipe in worker.output.values():
                pipe.close()
        for output in self._outputs.values():
            output.close()
        self._selector.close()

    # --- afterwards -----------------------------------------------------------------------------------------

    def _show_cause(self, cause: Ending) -> None:
        took = time.monotonic() - (self._ending_since or time.monotonic())
        ended = f"all workers have ended, after {took:.2f} s. " if len(self._workers) > 1 else ""
        path = self._outputs[cause.worker].file.path
        self._say(f"{ended}The last lines of worker {cause.worker} (all of them: {path}):")
        self._console.show_tail(cause.worker)

    def _result(self) -> AttemptResult:
        given_up = -int(signal.SIGKILL)
        endings = tuple(worker.ending or Ending(worker.worker, given_up, 0.0) for worker in self._workers)
        return AttemptResult(endings, self._cause, self._stop, self._resize)
