"""What is left to read: parts of a dataset, which any number of workers can share anew.

A *stream* is what one worker reads, or all of them alike. Its state says which parts of the dataset are its own, and
how far it has come; it is plain data, as goes into JSON. When a run goes on with other workers, what is left of all
streams is cut up and dealt out again.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import grain

Part = dict[str, Any]
"""Of examples with numbers: ``files`` (or ``None`` for the whole dataset), ``start`` and ``stop``. Of others:
``files``, ``skip`` (how many records at the start of a file are done) and ``state`` (of the iterator; ``None`` at the
start)."""

PARTS = "replicax_parts"


def remaining(parts: Sequence[Part], done: int) -> list[Part]:
    """Parts of numbered examples, without the first ``done`` ones.

    >>> from replicax.data.reading.elastic import remaining
    >>> remaining([{"files": None, "start": 0, "stop": 5}, {"files": None, "start": 7, "stop": 9}], 6)
    [{'files': None, 'start': 8, 'stop': 9}]
    """
    left = []
    for part in parts:
        size = part["stop"] - part["start"]
        if done < size:
            left.append({**part, "start": part["start"] + done})
        done = max(0, done - size)
    return left


def dealt_evenly(parts: Sequence[Part], count: int) -> list[list[Part]]:
    """Parts of numbered examples for ``count`` streams, each with as many examples as the others, or one more.

    >>> from replicax.data.reading.elastic import dealt_evenly
    >>> dealt_evenly([{"files": None, "start": 0, "stop": 5}], 2)
    [[{'files': None, 'start': 0, 'stop': 3}], [{'files': None, 'start': 3, 'stop': 5}]]
    """
    total = sum(part["stop"] - part["start"] for part in parts)
    sizes = [total // count + (i < total % count) for i in range(count)]
    streams = []
    rest = list(parts)
    for size in sizes:
        mine = []
        after = remaining(rest, size)
        kept = total - sum(p["stop"] - p["start"] for p in after)
        for part in rest:
            if kept <= 0:
                break
            take = min(kept, part["stop"] - part["start"])
            mine.append({**part, "stop": part["start"] + take})
            kept -= take
        total -= size
        rest = after
        streams.append(mine)
    return streams


def dealt_by_file(parts: Sequence[Part], count: int) -> list[list[Part]]:
    """Parts at the start of their files, or after the first records of them, for ``count`` streams."""
    files = [(file, part["skip"].get(file, 0)) for part in parts for file in part["files"]]
    hands = [files[i::count] for i in range(count)]
    return [
        [{"files": [f for f, _ in h], "skip": {f: n for f, n in h if n}, "state": None}] if h else [] for h in hands
    ]


def dealt_whole(parts: Sequence[Part], count: int) -> list[list[Part]]:
    """Parts that nothing is known of, for ``count`` streams."""
    return [list(parts[i::count]) for i in range(count)]


def find(state: Any, key: str) -> Any:
    """The value of ``key`` in the nested state of an iterator; ``None`` if it is not in there exactly once."""
    if isinstance(state, dict):
        if key in state:
            return state[key]
        state = list(state.values())
    found = [v for v in (find(s, key) for s in state) if v is not None] if isinstance(state, list) else []
    return found[0] if len(found) == 1 else None


class InSequence(grain.IterDataset):
    """One part after the other.

    Args:
      make: makes the dataset of a part.
      parts: which.
      is_ahead: whether something in it reads ahead.
    """

    def __init__(self, make: Any, parts: Sequence[Part], is_ahead: bool = False) -> None:
        super().__init__()
        self._make = make
        self._parts = list(parts)
        self._is_ahead = is_ahead

    def __iter__(self) -> _InSequence:
        return _InSequence(self._make, self._parts, self._is_ahead)


class _InSequence(grain.DatasetIterator):
    """Its state has the parts that are not finished, with how far the first one is."""

    def __init__(self, make: Any, parts: Sequence[Part], is_ahead: bool) -> None:
        super().__init__()
        self._make = make
        self._parts = list(parts)
        self._is_ahead = is_ahead
        self._current: Any = None

    def __next__(self) -> Any:
        self._assert_not_closed()
        while self._parts:
            if self._current is None:
                self._open()
            try:
                return next(self._current)
            except StopIteration:
                self._current.close()
                self._current = None
                self._parts = self._parts[1:]
            except Exception as error:
                self._add_place(error)
                raise
        raise StopIteration

    def _open(self) -> None:
        """Begin with the first part, or go on with it."""
        current = iter(self._make(self._parts[0]))
        if self._parts[0]["state"] is not None:
            current.set_state(self._parts[0]["state"])
        self._current = current

    def _add_place(self, error: Exception) -> None:
        """Say at which record of which file it was raised, if it does not say so itself."""
        with contextlib.suppress(Exception):  # what has failed may not know where it is
            state = self._current.get_state()
            file, record = find(state, "name"), find(state, "records")
            if file and record is not None and file not in str(error):
                # What reads ahead is a little further.
                after = ", or one soon after it" if self._is_ahead else ""
                error.add_note(f"(raised by record {record} of {file!r}, counted from 1{after})")

    def get_state(self) -> dict[str, Any]:
        if self._current is None:
            return {PARTS: self._parts}
        first = {**self._parts[0], "state": self._current.get_state()}
        return {PARTS: [first, *itertools.islice(self._parts, 1, None)]}

    def set_state(self, state: dict[str, Any]) -> None:
        self._release()
        self._parts = list(state[PARTS])
        if self._parts and self._parts[0]["state"] is not None:
            self._open()  # now, so that a state that the files no longer fit is refused

    def close(self) -> None:
        super().close()
        self._release()

    def _release(self) -> None:
        current, self._current = getattr(self, "_current", None), None
        if current is not None:
            current.close()
