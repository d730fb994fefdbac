"""Starts of workers' processes: none is sent anything before it has started."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from replicax.errors import WorkerError
from replicax.parameter_server.engine.actors import TIMEOUT, Actor, ActorDiedError, Reply
from replicax.parameter_server.scheduled import WorkerAtWork

_MOST = 5
_SECONDS = 300.0
_LONGEST = 5.0


class WorkerStarts:
    """Starts processes that take the place of others, and notes when they are there.

    So a function is not blamed for a process that dies in its start, and others have the function meanwhile.

    Args:
      start: starts the process of a worker.
      when_started: is called on some thread when a process has started or can't start any more; :meth:`note` is to
        follow.
    """

    def __init__(
        self, start: Callable[[int], Actor], when_started: Callable[[WorkerAtWork, Actor, Reply], None]
    ) -> None:
        self._start = start
        self._when_started = when_started
        self._in_vain = 0
        self._looked = time.monotonic()
        self._waited = 0.0

    def wait_for(self, worker: WorkerAtWork) -> None:
        """A worker's process has been begun to start."""
        actor = worker.actor
        reply = actor.call("ready")
        reply.when_done(lambda: self._when_started(worker, actor, reply))

    def replace(self, worker: WorkerAtWork) -> None:
        """Start another process, as the present one has died."""
        worker.actor.kill()  # it may only have become unreachable
        worker.replace(self._start(worker.index))
        self.wait_for(worker)

    def note(self, worker: WorkerAtWork, reply: Reply) -> bool:
        """Whether a worker is ready now; if its process has died, another is started.

        Raises:
          WorkerError: the processes always die.
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

    def check(self, workers: Iterable[WorkerAtWork]) -> None:
        """Raise if none has started for long. Called now and then; when it is not called, no time passes.

        Raises:
          TimeoutError: that is so.
        """
        now = time.monotonic()
        waited, self._looked = min(now - self._looked, _LONGEST), now
        self._waited = 0.0 if any(worker.is_ready for worker in workers) else self._waited + waited
        if self._waited > _SECONDS:
            raise TimeoutError(f"no worker has started within {_SECONDS:g} seconds")
