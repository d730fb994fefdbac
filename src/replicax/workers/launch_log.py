"""The launch log: a running hash of the programs that a worker has launched, and whether the last is still running.

Comparing programs at every call would cost more than a small step does. Instead each call updates a number, which is
the same on all workers that launch the same programs in the same order. Workers compare it whenever they exchange
something anyway, and the :mod:`watch <replicax.workers.liveness>` does when a program does not end.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from replicax.errors import DeadlockError, described, users_line
from replicax.workers.codec import declared

_PRIME = (1 << 61) - 1
_RECENT = 64
_SMALL, _FEW = 4096, 8
"""One of the first few results, of at most so many bytes, is kept to see when its program has ended."""


class Label:
    """Identifies a program by its ``number`` in the order of first launches, the same on all workers; 0 before.

    ``communicates`` says whether its replicas meet in collectives, so that none of them can end alone.
    """

    __slots__ = ("communicates", "name", "number")

    def __init__(self) -> None:
        self.number, self.name, self.communicates = 0, "", False


class LaunchedProgram:
    """One launch of a program, at ``since`` by ``time.monotonic``. Any thread can see whether the program has ended."""

    __slots__ = ("_output", "failure", "has_returned", "label", "since")

    def __init__(self, label: Label) -> None:
        self.label, self.since = label, time.monotonic()
        self.has_returned = False  # JAX's call
        self.failure: str | None = None  # the error of this worker's part
        self._output: Any = None

    def returned(self, written: Sequence[Any] = (), results: Sequence[Any] = ()) -> None:
        """Record the arrays that the call has returned (none if it failed), which show when the program has ended."""
        small = next((array for array in results[:_FEW] if array.nbytes <= _SMALL), None)
        shown = results or written
        self._output = weakref.ref(shown[0]) if small is None and shown else small
        self.has_returned = True

    def failed(self, error: BaseException) -> None:
        """Record that this worker's part has failed: the other workers may wait in theirs for ever.

        It has not after a timeout, when it may still come to its end.
        """
        if isinstance(error, Exception) and not isinstance(error, DeadlockError):
            self.failure = f"its part of {self.label.name!r} has failed at {users_line()}: {described(error)}"

    def has_ended(self) -> bool | None:
        """Return whether the program has ended; ``None`` if nothing shows that any more."""
        if not self.has_returned:
            return False
        output = self._output() if isinstance(self._output, weakref.ref) else self._output
        try:
            return None if output is None else bool(output.is_ready())
        except RuntimeError:  # a later program has taken its memory
            return None


@declared
@dataclasses.dataclass(frozen=True)
class RunningProgram:
    """A program that has not ended, as its worker reports it to others."""

    name: str  # the name of the program
    count: int  # how many programs the worker has launched, including this one
    communicates: bool  # whether it needs the other workers
    recent: tuple[tuple[int, int, str], ...]  # the last launches: for each the count, the hash and the program's name


class LaunchLog:
    """The programs that this worker has launched under one strategy."""

    def __init__(self) -> None:
        self.count = self.digest = 0
        self._numbers = itertools.count(1)
        self._recent: collections.deque[tuple[int, int, str]] = collections.deque(maxlen=_RECENT)
        self._launch: LaunchedProgram | None = None
        self._left_behind: list[threading.Thread] = []

    def begin(self, label: Label) -> LaunchedProgram:
        """Record that the program with this label is about to be launched."""
        if not label.number:
            label.number = next(self._numbers)
        self.count += 1
        self.digest = (self.digest * 1_000_003 + label.number) % _PRIME
        self._recent.append((self.count, self.digest, label.name))
        self._launch = LaunchedProgram(label)
        return self._launch

    @property
    def last(self) -> str:
        """The name of the last program."""
        return self._recent[-1][2] if self._recent else "none"

    @property
    def failure(self) -> str | None:
        """The reason why the last program has failed here, if others may wait in it for this worker."""
        return self._launch.failure if self._launch is not None and self._launch.label.communicates else None

    def running_since(self) -> float | None:
        """The time of the last launch, by ``time.monotonic``; ``None`` if the program has ended. From any thread."""
        launch = self._launch
        return launch.since if launch is not None and launch.has_ended() is False else None

    def leave_behind(self, thread: threading.Thread) -> None:
        """Record that a thread is in a program that the caller no longer waits for."""
        self._left_behind.append(thread)

    def keeps_devices(self) -> bool:
        """Return whether a program is still running although the main thread is in none: at the end of the process."""
        launch = self._launch
        is_computing = launch is not None and launch.has_returned and launch.has_ended() is False
        return is_computing or any(thread.is_alive() for thread in self._left_behind)

    def running(self) -> RunningProgram | None:
        """The last program, if it has not ended. From any thread."""
        launch = self._launch
        if launch is None or launch.has_ended() is not False:
            return None
        return RunningProgram(launch.label.name, self.count, launch.label.communicates, self.recent())

    def recent(self) -> tuple[tuple[int, int, str], ...]:
        """The last launches: for each the count, the hash and the program's name."""
        return tuple(self._recent)


def first_difference(ours: Sequence[tuple[int, int, str]], theirs: Sequence[tuple[int, int, str]]) -> Any:
    """Find where two workers' recent launches first differ: the count, and both programs; ``None`` if nowhere.

    >>> first_difference([(1, 7, "a"), (2, 9, "b")], [(2, 8, "c"), (3, 5, "a")])
    (2, 'b', 'c')
    """
    known = {count: (digest, name) for count, digest, name in ours}
    for count, digest, name in theirs:
        if count in known and known[count][0] != digest:
            return count, known[count][1], name
    return None
