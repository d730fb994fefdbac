"""The write-ahead log: messages to the servers since the last snapshot, which would be lost with them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any

Key = tuple[str, int]


@dataclasses.dataclass(eq=False)
class _Entry:
    """A logged message: whether it replaces a value that functions have used, and which, if no snapshot has that."""

    what: Any
    is_assigned: bool
    first: Any = None


class WriteAheadLog:
    """The last message of each kind and number.

    One thread may take a snapshot while another sends. So an entry is made before the sending, and removed when a
    snapshot has begun after it. The lock is held only briefly, and never while waiting.
    """

    def __init__(self) -> None:
        self._sent: dict[Key, _Entry] = {}
        self._arrived: dict[Key, _Entry] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def sending(self, kind: str, what: Mapping[int, Any], assigned: Collection[int] = ()) -> Iterator[None]:
        """Log messages, by number, while they are sent inside the ``with`` block; after it, they have arrived.

        Those with the numbers ``assigned`` replace values that functions have used.
        """
        entries = {(kind, number): _Entry(one, number in assigned) for number, one in what.items()}
        with self._lock:
            for key, entry in entries.items():
                before = self._sent.get(key)
                if entry.is_assigned and before is not None:
                    entry.first = before.first if before.is_assigned else before.what
            self._sent.update(entries)
        yield
        with self._lock:
            self._arrived.update(entries)

    def arrived(self) -> Mapping[Key, _Entry]:
        """The messages that have arrived."""
        with self._lock:
            return dict(self._arrived)

    def clear(self, saved: Mapping[Key, _Entry]) -> None:
        """Remove messages that had arrived earlier (:meth:`arrived`) and are now in a snapshot."""
        with self._lock:
            for known in (self._sent, self._arrived):
                for key, entry in saved.items():
                    if known.get(key) is entry:
                        del known[key]
                    elif key in known:
                        known[key].first = None

    def forget(self, variables: Collection[int], optimizers: Collection[int]) -> None:
        """Remove dropped objects."""
        with self._lock:
            for key in [*(("value", n) for n in variables), *(("optimizer", n) for n in optimizers)]:
                self._sent.pop(key, None)
                self._arrived.pop(key, None)

    def sent(self, kind: str) -> dict[int, Any]:
        """The messages to repeat after the servers have gone back to the last snapshot, before functions are run."""
        with self._lock:
            entries = {number: entry for (of, number), entry in self._sent.items() if of == kind}
        found = {number: entry.first if entry.is_assigned else entry.what for number, entry in entries.items()}
        return {number: what for number, what in found.items() if what is not None}

    def assigned(self, kind: str) -> dict[int, Any]:
        """The messages to repeat after that, when functions that had ended have been run again."""
        with self._lock:
            return {n: entry.what for (of, n), entry in self._sent.items() if of == kind and entry.is_assigned}

    @property
    def has_assigned(self) -> bool:
        """Whether a message replaces a value that functions have used."""
        with self._lock:
            return any(entry.is_assigned for entry in self._sent.values())
