"""Scheduled functions, the workers that have them, and what is said of those that have failed."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any

from replicax.errors import WorkerError
from replicax.parameter_server.definitions import CallOutcome
from replicax.parameter_server.engine.actors import Actor
from replicax.parameter_server.remote_values import RemoteValue

_KEPT_FUNCTIONS = 64


@dataclasses.dataclass(eq=False)
class Scheduled:
    """A function that is to be run once."""

    number: int
    name: str
    digest: str
    fn: bytes
    arguments: bytes
    uses: Sequence[Any]
    """What it refers to, which is there as long as the function may be run."""
    value: RemoteValue
    deaths: int = 0
    beside: int = 0
    """How many other functions were running when it was sent, and have been sent since."""

    @property
    def title(self) -> str:
        """The function in a message."""
        return f"{self.name} (scheduled function {self.number})"

    @property
    def inputs(self) -> list[RemoteValue]:
        """The results of other functions that it uses."""
        return [used for used in self.uses if isinstance(used, RemoteValue)]


class WorkerAtWork:
    """A worker, as the dispatcher sees it.

    Attributes:
      is_ready: whether its process has started.
      running: the function that it has.
    """

    def __init__(self, index: int, actor: Actor) -> None:
        self.index = index
        self.running: Scheduled | None = None
        self.replace(actor)

    def replace(self, actor: Actor) -> None:
        """Another process takes its place."""
        self.actor = actor
        self.is_ready = False
        self.definitions = 0
        self._functions: dict[str, None] = {}

    def is_to_know(self, digest: str) -> tuple[bool, list[str]]:
        """A function is sent: whether the process has it, and which others it is to forget."""
        known = digest in self._functions
        self._functions.pop(digest, None)
        self._functions[digest] = None  # the last used are last
        old = list(self._functions)[:-_KEPT_FUNCTIONS]
        for one in old:
            del self._functions[one]
        return known, old


def progress(workers: Sequence[WorkerAtWork], waiting: int) -> str:
    """Who runs what, and how many functions wait."""
    running = [f"worker {worker.index} runs {worker.running.title}" for worker in workers if worker.running]
    starting = [f"worker {worker.index} is starting" for worker in workers if not worker.is_ready]
    return "; ".join([*running, *starting, f"{waiting} functions wait"])


def not_run(scheduled: Scheduled, why: BaseException | None) -> WorkerError:
    """The error of a function that was not run."""
    first = str(why).splitlines()[0] if why is not None and str(why) else "it was called off"
    return WorkerError(f"{scheduled.title} was not run: {first}")


def error_of(worker: int, scheduled: Scheduled, outcome: CallOutcome) -> WorkerError:
    """The error of a function that a worker has failed at."""
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
    except Exception:  # its class is not here
        return None
    return found if isinstance(found, BaseException) else None
