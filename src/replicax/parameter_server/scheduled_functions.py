"""Scheduled functions, the workers that run them, and the errors of those that fail."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Callable, Sequence
from typing import Any

from replicax.errors import WorkerError
from replicax.parameter_server.actors import TIMEOUT, Actor, ActorDiedError, Reply
from replicax.parameter_server.definitions import FunctionCall
from replicax.parameter_server.pickling import Reference
from replicax.parameter_server.remote_values import RemoteValue

_MOST_STARTS = 5


@dataclasses.dataclass(eq=False)
class ScheduledFunction:
    """A function to be run once."""

    call: FunctionCall
    data: bytes | Reply  # the pickled function, or its place in Ray's object store
    uses: Sequence[Any]  # the objects that it refers to, kept alive as long as the function may run
    value: RemoteValue
    deaths: int = 0
    beside: int = 0  # how many other functions were running when it was sent, or have been sent since

    @property
    def number(self) -> int:
        return self.call.number

    @property
    def inputs(self) -> list[RemoteValue]:
        """The results of other functions that it uses."""
        return [used for used in self.uses if isinstance(used, RemoteValue)]

    @property
    def runs_again(self) -> bool:
        """Return whether the function had ended before the servers went back."""
        return self.value.is_finished

    def cancel(self, why: object) -> None:
        """Finish its value with an error that has the first line of ``why``, unless it had ended."""
        self.value._finish(error=WorkerError(f"{self.value.name} was not run: {str(why).splitlines()[0]}"))


class BusyWorker:
    """A worker, as the dispatcher sees it: the function that it runs, and what its process knows.

    Only a process that is ready gets functions. So one that dies while it starts is not blamed on a function, and other
    workers run the function meanwhile. Replies of the process go to the ``inbox``: the first one, without a function,
    says that it has started or failed to, and is for :meth:`note`.
    """

    def __init__(self, index: int, start: Callable[[int], Actor], inbox: Inbox) -> None:
        self.index = index
        self._start = start
        self._inbox = inbox
        self._in_vain = 0
        self.running: ScheduledFunction | None = None
        self._begin()

    def _begin(self) -> None:
        self.actor = self._start(self.index)
        self.is_ready = False
        self.definitions: dict[Reference, Any] = {}
        self.call(None, "ready")

    def call(self, scheduled: ScheduledFunction | None, method: str, *args: Any) -> None:
        """Call a method of its process, for a function or to start; the reply goes to the inbox."""
        reply = self.actor.call(method, *args)
        reply.when_done(lambda: self._inbox.put((self, scheduled, reply)))

    def replace(self) -> None:
        """Start another process after the present one has died."""
        self.actor.kill()  # it may only have become unreachable
        self._begin()

    def note(self, reply: Reply) -> bool:
        """Return whether the worker is ready; if its process died, start another, or raise after many in a row."""
        try:
            reply.result(TIMEOUT)
        except ActorDiedError as error:
            self._in_vain += 1
            if self._in_vain >= _MOST_STARTS:
                raise WorkerError(
                    f"worker {self.index} has died in its start, the {_MOST_STARTS}th in a row: {error}"
                ) from None
            self.replace()
            return False
        self.is_ready, self._in_vain = True, 0
        return True


Inbox = queue.SimpleQueue[tuple[BusyWorker, ScheduledFunction | None, Reply] | None]
"""Replies of workers, each with its function; ``None`` ends the dispatcher. A process makes one call at a time."""


def progress(workers: Sequence[BusyWorker], waiting: int) -> str:
    """Return what each worker runs and how many functions wait, in words."""
    running = [f"worker {worker.index} runs {worker.running.value.name}" for worker in workers if worker.running]
    starting = [f"worker {worker.index} is starting" for worker in workers if not worker.is_ready]
    return "; ".join([*running, *starting, f"{waiting} functions wait"])
