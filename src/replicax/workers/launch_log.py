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

from replicax.workers.codec import declared

_PRIME = (1 << 61) - 1
_RECENT = 64


class Label:
    """Identifies a program, by the same number on all workers.

    Attributes:
      number: in the order in which programs are first launched; 0 before that.
      name: of the program.
      meets: whether its replicas communicate in collectives, so that none of them can end alone.
    """

    __slots__ = ("meets", "name", "number")

    def __init__(self) -> None:
        self.number, self.name, self.meets = 0, "", False


@declared
@dataclasses.dataclass(frozen=True)
class RunningProgram:
    """A program that has not ended, as its worker reports it to others.

    Attributes:
      name: of the program.
      count: how many programs the worker has launched, including this one.
      meets: whether it needs the other workers.
      recent: the last launches: for each the count, the hash and the program's name.
    """

    name: str
    count: int
    meets: bool
    recent: tuple[tuple[int, int, str], ...]


class LaunchLog:
    """The programs that this worker has launched under one strategy."""

    def __init__(self) -> None:
        self.count = self.digest = 0
        self._numbers = itertools.count(1)
        self._recent: collections.deque[tuple[int, int, str]] = collections.deque(maxlen=_RECENT)
        self._since = 0.0
        self._label: Label | None = None
        self._is_calling = False
        self._output: weakref.ref[Any] | None = None
        self._left_behind: list[threading.Thread] = []

    def begin(self, label: Label) -> None:
        """The program with this label is about to be launched."""
        if not label.number:
            label.number = next(self._numbers)
        self.count += 1
        self.digest = (self.digest * 1_000_003 + label.number) % _PRIME
        self._recent.append((self.count, self.digest, label.name))
        self._label, self._since, self._output = label, time.monotonic(), None
        self._is_calling = True

    def end(self, outputs: Sequence[Any] = ()) -> None:
        """The program has been launched, and computes ``outputs``; none if the launch failed."""
        self._output = weakref.ref(outputs[0]) if outputs else None
        self._is_calling = False

    @property
    def last(self) -> str:
        """The name of the last program."""
        return self._recent[-1][2] if self._recent else "none"

    def running_since(self) -> float | None:
        """When the last program was launched, by ``time.monotonic``; ``None`` if it has ended. From any thread."""
        return self._since if self._is_calling or self._is_computing() else None

    def leave_behind(self, thread: threading.Thread) -> None:
        """A thread is in a program that the caller no longer waits for."""
        self._left_behind.append(thread)

    def keeps_devices(self) -> bool:
        """Whether a program is still running although the main thread is in none: at the end of the process."""
        return self._is_computing() or any(thread.is_alive() for thread in self._left_behind)

    def _is_computing(self) -> bool:
        output = self._output
        array = None if output is None else output()
        try:
            return array is not None and not array.is_ready()
        except RuntimeError:  # another program has taken its memory
            return False

    def running(self) -> RunningProgram | None:
        """The last program, if it has not ended. From any thread."""
        label = self._label
        if label is None or self.running_since() is None:
            return None
        return RunningProgram(label.name, self.count, label.meets, self.recent())

    def recent(self) -> tuple[tuple[int, int, str], ...]:
        """The last launches: for each the count, the hash and the program's name."""
        return tuple(self._recent)


def first_difference(ours: Sequence[tuple[int, int, str]], theirs: Sequence[tuple[int, int, str]]) -> Any:
    """Where two workers' recent launches first differ: the count, and both programs; ``None`` if nowhere.

    >>> from replicax.workers.launch_log import first_difference
    >>> first_difference([(1, 7, "a"), (2, 9, "b")], [(2, 8, "c"), (3, 5, "a")])
    (2, 'b', 'c')
    """
    known = {count: (digest, name) for count, digest, name in ours}
    for count, digest, name in theirs:
        if count in known and known[count][0] != digest:
            return count, known[count][1], name
    return None
