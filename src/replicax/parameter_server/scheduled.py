"""Scheduled functions, the workers that have them, and what is said of those that have failed."""

from __future__ import annotations

import dataclasses
import pickle

from replicax.errors import WorkerError
from replicax.parameter_server.definitions import CallOutcome
from replicax.parameter_server.engine.actors import Actor
from replicax.parameter_server.remote_values import RemoteValue


@dataclasses.dataclass(eq=False)
class Scheduled:
    """A function that is to be run once."""

    number: int
    name: str
    digest: str
    fn: bytes
    arguments: bytes
    value: RemoteValue
    deaths: int = 0
    beside: int = 0
    """How many other functions were running when it was sent, and have been sent since."""

    @property
    def title(self) -> str:
        """The function in a message."""
        return f"{self.name} (scheduled function {self.number})"


class WorkerAtWork:
    """A worker, as the dispatcher sees it.

    Attributes:
      in_flight: the functions that it has. It runs the first; another one, if there is one, is next.
      seconds: how long it has computed for a function the last time, by digest.
      error: of the last function that has failed there.
    """

    def __init__(self, index: int, actor: Actor) -> None:
        self.index = index
        self.in_flight: list[Scheduled] = []
        self.seconds: dict[str, float] = {}
        self.error: WorkerError | None = None
        self.replace(actor)

    def replace(self, actor: Actor) -> None:
        """Another process takes its place."""
        self.actor = actor
        self.calls = self.failures = self.definitions = 0
        self.functions: set[str] = set()
        self.seconds.clear()


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
