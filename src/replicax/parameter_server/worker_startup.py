"""Starts workers' processes; functions are sent only to processes that have started."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from replicax.errors import WorkerError
from replicax.parameter_server.actors import TIMEOUT, Actor, ActorDiedError, Reply
from replicax.parameter_server.scheduled_functions import BusyWorker

_MOST = 5
_SECONDS = 300.0
_LONGEST = 5.0


class WorkerStartup:
    """Starts replacement processes, and notes when they are ready.

    So a process that dies while it starts is not blamed on a function, and other workers run the function meanwhile.

    Args:
      start: starts the process of a worker.
      when_started: called on some thread when a process has started or failed to start; must lead to a call of
        :meth:`note`.
    """

    def __init__(self, start: Callable[[int], Actor], when_started: Callable[[BusyWorker, Actor, Reply], None]) -> None:
        self._start = start
        self._when_started = when_started
        self._in_vain = 0
        self._looked = time.monotonic()
        self._waited = 0.0

    def wait_for(self, worker: BusyWorker) -> None:
        """Note that a worker's process is starting."""
        actor = worker.actor
        reply = actor.call("ready")
        reply.when_done(lambda: self._when_started(worker, actor, reply))

    def replace(self, worker: BusyWorker) -> None:
        """Start another process after the present one has died."""
        worker.actor.kill()  # it may only have become unreachable
        worker.replace(self._start(worker.index))
        self.wait_for(worker)

    def note(self, worker: BusyWorker, reply: Reply) -> bool:
        """Whether a worker is ready; if its process has died, starts another.

        Raises:
          WorkerError: its processes die again and again.
        """
        try:
            reply.result(TIMEOUT)
        except ActorDiedError as error:
            self._in_vain += 1
            if self._in_vain >= _MOST:
                raise WorkerError(
                    f"worker {worker.index} has died in its start, the {_MOST}th in a row: {error}"
                ) from None
            self.replace(worker)
            return False
        worker.is_ready, self._in_vain = True, 0
        return True

    def check(self, workers: Iterable[BusyWorker]) -> None:
        """Raise if no process has started for long. Call it regularly: long times between calls count only in part.

        Raises:
          TimeoutError: none has.
        """
        now = time.monotonic()
        waited, self._looked = min(now - self._looked, _LONGEST), now
        self._waited = 0.0 if any(worker.is_ready for worker in workers) else self._waited + waited
        if self._waited > _SECONDS:
            raise TimeoutError(f"no worker has started within {_SECONDS:g} seconds")
