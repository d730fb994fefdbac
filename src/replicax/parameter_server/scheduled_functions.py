"""Scheduled functions, the workers that run them, and the errors of those that fail."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from replicax.errors import WorkerError
from replicax.parameter_server.actors import TIMEOUT, Actor, ActorDiedError, Reply
from replicax.parameter_server.remote_values import RemoteValue

_MOST_STARTS = 5
_SECONDS = 300.0
_LONGEST = 5.0


@dataclasses.dataclass(eq=False)
class ScheduledFunction:
    """A function to be run once.

    Attributes:
      data: the pickled function, which the digest identifies, in Ray's object store.
      arguments: ``(args, kwargs)``, pickled.
      uses: the objects that it refers to, kept alive as long as the function may run.
      beside: how many other functions were running when it was sent, or have been sent since.
    """

    number: int
    name: str
    digest: str
    data: Reply
    arguments: bytes
    uses: Sequence[Any]
    value: RemoteValue
    deaths: int = 0
    beside: int = 0

    @property
    def inputs(self) -> list[RemoteValue]:
        """The results of other functions that it uses."""
        return [used for used in self.uses if isinstance(used, RemoteValue)]


class BusyWorker:
    """A worker, as the dispatcher sees it: the function that it runs, and what its process knows once it is ready."""

    def __init__(self, index: int, actor: Actor) -> None:
        self.index = index
        self.running: ScheduledFunction | None = None
        self.replace(actor)

    def replace(self, actor: Actor) -> None:
        self.actor = actor
        self.is_ready = False
        self.definitions = 0


class WorkerStartup:
    """Starts processes that replace dead ones, and notes when they are ready: only then do they get functions.

    So a process that dies while it starts is not blamed on a function, and other workers run the function meanwhile.
    ``when_started`` is called on some thread when a process has started or failed to start; it must lead to a call of
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
        """Whether a worker is ready; if its process has died, starts another, or raises after many deaths in a row."""
        try:
            reply.result(TIMEOUT)
        except ActorDiedError as error:
            self._in_vain += 1
            if self._in_vain >= _MOST_STARTS:
                raise WorkerError(
                    f"worker {worker.index} has died in its start, the {_MOST_STARTS}th in a row: {error}"
                ) from None
            self.replace(worker)
            return False
        worker.is_ready, self._in_vain = True, 0
        return True

    def check(self, workers: Iterable[BusyWorker]) -> None:
        """Raise if no process has started for long. Call it regularly: long times between calls count only in part."""
        now = time.monotonic()
        waited, self._looked = min(now - self._looked, _LONGEST), now
        self._waited = 0.0 if any(worker.is_ready for worker in workers) else self._waited + waited
        if self._waited > _SECONDS:
            raise TimeoutError(f"no worker has started within {_SECONDS:g} seconds")


def progress(workers: Sequence[BusyWorker], waiting: int) -> str:
    """What each worker runs, and how many functions wait."""
    running = [f"worker {worker.index} runs {worker.running.value.name}" for worker in workers if worker.running]
    starting = [f"worker {worker.index} is starting" for worker in workers if not worker.is_ready]
    return "; ".join([*running, *starting, f"{waiting} functions wait"])


def not_run(scheduled: ScheduledFunction, why: BaseException | None) -> WorkerError:
    """The error of a function that was not run."""
    first = str(why).splitlines()[0] if why is not None and str(why) else "it was called off"
    return WorkerError(f"{scheduled.value.name} was not run: {first}")
