"""The write-ahead log: messages to the servers since the last snapshot, which would be lost with them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any


class WriteAheadLog:
    """The last message of each kind and number; of values that the program assigned, also the first one before.

    One thread may take a snapshot while another sends; only one sends at a time. So an entry is made before the
    sending, and removed when a snapshot has begun after it. The lock is held only briefly, and never while waiting.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str, int, bool], tuple[int, Any]] = {}
        self._count = 0
        self._lock = threading.Lock()
        self.arrived = 0
        """The number of messages that have arrived."""

    @contextlib.contextmanager
    def sending(self, kind: str, what: Mapping[int, Any], assigned: Collection[int] = ()) -> Iterator[None]:
        """Log messages, by number, while they are sent inside the ``with`` block; after it, they have arrived.

        Those with the numbers ``assigned`` replace values that functions have used.
        """
        with self._lock:
            self._count += 1
            for number, one in what.items():
                if number not in assigned:
                    self._entries.pop((kind, number, True), None)
                self._entries[kind, number, number in assigned] = self._count, one
        yield
        self.arrived = self._count

    def clear(self, saved: int) -> None:
        """Remove messages that had arrived earlier (:attr:`arrived`) and are now in a snapshot."""
        with self._lock:
            self._entries = {key: entry for key, entry in self._entries.items() if entry[0] > saved}

    def forget(self, variables: Collection[int], optimizers: Collection[int]) -> None:
        """Remove dropped objects."""
        gone = {"value": variables, "optimizer": optimizers}
        with self._lock:
            self._entries = {key: entry for key, entry in self._entries.items() if key[1] not in gone[key[0]]}

    def sent(self, kind: str) -> dict[int, Any]:
        """The messages to repeat after the servers have gone back to the last snapshot, before functions are run."""
        return self._logged(kind, False)

    def assigned(self, kind: str) -> dict[int, Any]:
        """The messages to repeat after that, when functions that had ended have been run again."""
        return self._logged(kind, True)

    def _logged(self, kind: str, is_assigned: bool) -> dict[int, Any]:
        with self._lock:
            return {key[1]: what for key, (_, what) in self._entries.items() if key[::2] == (kind, is_assigned)}

    @property
    def has_assigned(self) -> bool:
        """Whether a message replaces a value that functions have used."""
        with self._lock:
            return any(is_assigned for *_, is_assigned in self._entries)
