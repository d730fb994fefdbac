"""Scheduled functions, the workers that run them, and the errors of those that fail."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any

from replicax.errors import WorkerError
from replicax.parameter_server.actors import Actor
from replicax.parameter_server.definitions import CallOutcome
from replicax.parameter_server.remote_values import RemoteValue

_KEPT_FUNCTIONS = 64


@dataclasses.dataclass(eq=False)
class ScheduledFunction:
    """A function to be run once."""

    number: int
    name: str
    digest: str
    fn: bytes
    arguments: bytes
    uses: Sequence[Any]
    """The objects that it refers to, kept alive as long as the function may run."""
    value: RemoteValue
    deaths: int = 0
    beside: int = 0
    """How many other functions were running when it was sent, or have been sent since."""

    @property
    def title(self) -> str:
        """The name of the function in messages."""
        return f"{self.name} (scheduled function {self.number})"

    @property
    def inputs(self) -> list[RemoteValue]:
        """The results of other functions that it uses."""
        return [used for used in self.uses if isinstance(used, RemoteValue)]


class BusyWorker:
    """A worker, as the dispatcher sees it.

    Attributes:
      is_ready: whether its process has started.
      running: its present function.
    """

    def __init__(self, index: int, actor: Actor) -> None:
        self.index = index
        self.running: ScheduledFunction | None = None
        self.replace(actor)

    def replace(self, actor: Actor) -> None:
        """Replace its process."""
        self.actor = actor
        self.is_ready = False
        self.definitions = 0
        self._functions: dict[str, None] = {}

    def before_sending(self, digest: str) -> tuple[bool, list[str]]:
        """Before sending a function: whether the process already has it, and which others it must forget."""
        known = digest in self._functions
        self._functions.pop(digest, None)
        self._functions[digest] = None  # keeps the most recently used last
        old = list(self._functions)[:-_KEPT_FUNCTIONS]
        for one in old:
            del self._functions[one]
        return known, old


def progress(workers: Sequence[BusyWorker], waiting: int) -> str:
    """What each worker runs, and how many functions wait."""
    running = [f"worker {worker.index} runs {worker.running.title}" for worker in workers if worker.running]
    starting = [f"worker {worker.index} is starting" for worker in workers if not worker.is_ready]
    return "; ".join([*running, *starting, f"{waiting} functions wait"])


def not_run(scheduled: ScheduledFunction, why: BaseException | None) -> WorkerError:
    """The error of a function that was not run."""
    first = str(why).splitlines()[0] if why is not None and str(why) else "it was called off"
    return WorkerError(f"{scheduled.title} was not run: {first}")


def error_of(worker: int, scheduled: ScheduledFunction, outcome: CallOutcome) -> WorkerError:
    """The error of a function that has failed on a worker."""
    if outcome.failure is None:
        return WorkerError(f"{scheduled.title}, on worker {worker}: {outcome.lost}")
    failure = outcome.failure
    where = f" at {failure.line}" if failure.line else ""
    error = WorkerError(f"{scheduled.title} failed on worker {worker}{where}: {failure.kind}: {failure.text}")
    if failure.error is not None:
        error.__cause__ = _unpickled(failure.error)
    if failure.traceback:
        error.add_note(f"On worker {worker}:\n{failure.traceback.rstrip()}")
    return error


def _unpickled(error: bytes) -> BaseException | None:
    try:
        found = pickle.loads(error)
    except Exception:  # its class can't be imported here
        return None
    return found if isinstance(found, BaseException) else None
