"""The board: status messages that workers post for each other in the coordination service."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from replicax.errors import DeadlockError, WorkerError
from replicax.workers.codec import declared, dumps, loads
from replicax.workers.launch_log import RunningProgram, first_difference
from replicax.workers.peer_death import Home

_ALL = "replicax/ends"
_HOME = "replicax/peers"

Recent = dict[str, tuple[tuple[int, int, str], ...]]
"""The last programs that a worker launched, by strategy; see :class:`RunningProgram`."""


@declared
@dataclasses.dataclass(frozen=True)
class End:
    """The end of a worker's program."""

    failed: bool  # by an error, rather than by its last line or ``sys.exit``
    why: str  # the error, in words
    because_of: int | None  # the worker whose failure was the cause, if it was another one
    recent: Recent  # what it launched last

    def launched(self, strategy: str) -> int:
        """Return the number of programs that the worker has launched."""
        recent = self.recent.get(strategy)
        return recent[-1][0] if recent else 0


@dataclasses.dataclass(frozen=True)
class Problem:
    """The reason why the workers can't go on, as the error to raise."""

    kind: type[WorkerError] | type[DeadlockError]
    text: str
    worker: int | None = None  # whose failure is the cause; ``None`` if the workers run different programs

    @classmethod
    def of_failure(cls, worker: int, count: int, why: str) -> Problem:
        """Make the problem that worker ``worker`` of ``count`` has failed."""
        return cls(WorkerError, f"worker {worker} of {count} (numbered from 0) has failed: {why}", worker)


@dataclasses.dataclass
class Board:
    """The messages that the workers have posted."""

    # How the programs of the others ended, by worker.
    ends: dict[int, End] = dataclasses.field(default_factory=dict)
    # Workers that leave without waiting.
    gone: set[int] = dataclasses.field(default_factory=set)
    # Programs of the others that have run for long, by worker and strategy.
    stuck: dict[int, dict[str, RunningProgram]] = dataclasses.field(default_factory=dict)
    # For each call, the workers that answered it and what each launched last.
    calls: dict[str, dict[int, Recent]] = dataclasses.field(default_factory=dict)

    def recent(self, strategy: str) -> dict[int, tuple[tuple[int, int, str], ...]]:
        """Return the last launches under ``strategy`` of each worker that reported them."""
        told = [(worker, end.recent.get(strategy, ())) for worker, end in self.ends.items()]
        told += [(worker, programs[strategy].recent) for worker, programs in self.stuck.items() if strategy in programs]
        for answers in self.calls.values():
            told += [(worker, recent.get(strategy, ())) for worker, recent in answers.items()]
        return dict(sorted(told, key=lambda entry: entry[1][-1:]))  # the latest of several reports of one worker

    def problem(self, index: int, count: int, launched: Recent) -> Problem | None:
        """The problem that the messages show, if any: a worker has failed, or workers run different programs."""
        failed = [worker for worker, end in sorted(self.ends.items()) if end.failed]
        if failed:
            first_failures = [worker for worker in failed if self.ends[worker].because_of is None]
            worker = (first_failures or failed)[0]
            return Problem.of_failure(worker, count, self.ends[worker].why)
        for strategy, own_recent in launched.items():
            recent = self.recent(strategy) | {index: own_recent}
            for (a, ours), (b, theirs) in itertools.combinations(sorted(recent.items()), 2):
                difference = first_difference(ours, theirs)
                if difference is not None:
                    number, one, other = difference
                    text = (
                        f"the workers do not run the same programs: number {number} is {one!r} on worker {a}, and "
                        f"{other!r} on worker {b}. All workers must run the same steps in the same order."
                    )
                    return Problem(DeadlockError, text)
        return None

    def ahead(self, strategy: str, index: int, count: int, doing: str) -> dict[int, str]:
        """A message for each worker that waits in a program that worker ``index``, which asks, has not launched.

        That worker has launched ``count`` programs, and is ``doing`` what the others would have to do first, too.
        """
        running = {worker: programs[strategy] for worker, programs in self.stuck.items() if strategy in programs}
        return {
            worker: f"the workers do not do the same: worker {worker} runs {theirs.name!r}, as its program number "
            f"{theirs.count}, which needs this worker, and worker {index}, after {count} programs, {doing}. "
            "All workers must run the same program, with the same steps in the same order."
            for worker, theirs in running.items()
            if theirs.communicates and theirs.count > count
        }


class Service:
    """One worker's access to the board."""

    def __init__(self, client: Any, index: int) -> None:
        self._client = client
        self._index = index

    def read(self) -> Board:
        """Read all messages."""
        board = Board()
        for key, value in self._client.key_value_dir_get_bytes(_ALL):
            kind, *rest = key.removeprefix(_ALL + "/").split("/")
            if kind == "end":
                board.ends[int(rest[0])] = loads(value)
            elif kind == "gone":
                board.gone.add(int(rest[0]))
            elif kind == "stuck":
                board.stuck[int(rest[0])] = loads(value)
            elif kind == "call":
                board.calls.setdefault(rest[0], {})[int(rest[1])] = loads(value)
        board.ends.pop(self._index, None)
        board.stuck.pop(self._index, None)
        return board

    def post_end(self, end: End, worker: int | None = None) -> None:
        """Post how this worker's program ended; or that of ``worker``, which can't do so any more."""
        self._post(f"end/{self._index if worker is None else worker}", dumps(end))

    def post_gone(self) -> None:
        """Post that this worker leaves without waiting."""
        self._post(f"gone/{self._index}", b"")

    def post_stuck(self, programs: dict[str, RunningProgram]) -> None:
        """Post which programs of this worker have run for long; replaces the last such message."""
        if programs:
            self._post(f"stuck/{self._index}", dumps(programs))
        else:
            self._client.key_value_delete(f"{_ALL}/stuck/{self._index}")

    def post_home(self, home: Home) -> None:
        """Post where the chief's end of the connections listens."""
        self._client.key_value_set_bytes(f"{_HOME}/chief", dumps(home), allow_overwrite=True)

    def home(self) -> Home | None:
        """Return where the chief's end of the connections listens; ``None`` if it has not been posted."""
        for _, value in self._client.key_value_dir_get_bytes(_HOME):
            return loads(value)
        return None

    def answer(self, call: str, recent: Recent) -> None:
        """Answer a call, this worker's or another's: this worker is alive, and launched ``recent`` last."""
        self._client.key_value_set_bytes(f"{_ALL}/call/{call}/{self._index}", dumps(recent))

    def end_call(self, call: str) -> None:
        """Remove a call."""
        self._client.key_value_delete(f"{_ALL}/call/{call}")

    def _post(self, name: str, value: bytes) -> None:
        self._client.key_value_set_bytes(f"{_ALL}/{name}", value, allow_overwrite=True)
