"""Iterators for Grain's graphs: over functions and loaders, and over parts in sequence."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np

from replicax._grain import nodes
from replicax.data.reading.remaining_parts import PARTS, Part, find
from replicax.pytrees import registered

_NOTHING: Any = object()


class Replayed(nodes.Iterated):
    """The batches of iterators that a function makes. To reach a place, it reads everything before it again."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        super().__init__(ReplayIterator, make)


class ReplayIterator(nodes.Iterator):
    """One pass; its state is the number of rows so far, in whatever batches they came."""

    _iterator: Iterator[Any] | None = None  # for close, if __init__ is interrupted

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        super().__init__()
        self._make = make
        self._rows = 0
        self._skip = 0  # how many of these have yet to be skipped

    def __next__(self) -> Any:
        if self.is_closed:
            raise self.closed_error()
        if self._iterator is None:
            self._iterator = iter(self._make())
        while True:
            batch = next(self._iterator, _NOTHING)
            if batch is _NOTHING:
                if self._skip:
                    raise ValueError(
                        f"{self._rows} rows of this dataset had been given when the state was saved, but it has only "
                        f"{self._rows - self._skip} now: has it been changed?"
                    )
                raise StopIteration
            rows = count_rows(batch)
            if not self._skip or self._skip < rows:
                break
            self._skip -= rows
        skipped, self._skip = self._skip, 0
        self._rows += rows - skipped
        return jax.tree_util.tree_map(lambda leaf: leaf[skipped:], registered(batch)) if skipped else batch

    def get_state(self) -> dict[str, Any]:
        return {"rows": self._rows}

    def set_state(self, state: dict[str, Any]) -> None:
        self.release()
        self._rows = self._skip = int(state["rows"])

    def release(self) -> None:
        close = getattr(self._iterator, "close", None)  # a generator has one
        self._iterator = None
        if close is not None:
            close()


def count_rows(batch: Any) -> int:
    """The size of dim 0 of the first array of ``batch``; 0 if there is none."""
    leaf = next(iter(jax.tree_util.tree_leaves(registered(batch))), None)
    shape = np.shape(leaf) if leaf is not None else ()
    return int(shape[0]) if shape else 0


class LoaderIterator(nodes.Iterator):
    """One pass of a ``grain.DataLoader``, whose iterators have their own kind of state."""

    def __init__(self, loader: grain.DataLoader) -> None:
        super().__init__()
        self._iterator: Any = iter(loader)

    def __next__(self) -> Any:
        if self.is_closed:
            raise self.closed_error()
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        return {"loader": self._iterator.get_state().decode()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._iterator.set_state(state["loader"].encode())

    def release(self) -> None:
        self._iterator = None  # a loader's iterator has no close: dropping it ends its threads and processes


class SequenceIterator(nodes.Iterator):
    """The elements of parts, one after the other; its state has the unfinished parts and the place in the first."""

    _current: Any = None  # for close, if __init__ is interrupted

    def __init__(self, make: Callable[[Part], Any], parts: Sequence[Part], is_ahead: bool) -> None:
        super().__init__()
        self._make = make
        self._parts = list(parts)
        self._is_ahead = is_ahead

    def __next__(self) -> Any:
        if self.is_closed:
            raise self.closed_error()
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
        """Open the first part, at its place."""
        current = iter(self._make(self._parts[0]))
        if self._parts[0]["state"] is not None:
            current.set_state(self._parts[0]["state"])
        self._current = current

    def _add_place(self, error: Exception) -> None:
        """Add the file and the record at which an error occurred, unless the message has them."""
        with contextlib.suppress(Exception):  # the iterator that failed may not know its place
            state = self._current.get_state()
            file, record = find(state, "name"), find(state, "records")
            if file and record is not None and file not in str(error):
                # A stage that reads ahead is a little further.
                after = ", or one soon after it" if self._is_ahead else ""
                error.add_note(f"(raised by record {record} of {file!r}, counted from 1{after})")

    def get_state(self) -> dict[str, Any]:
        if self._current is None:
            return {PARTS: self._parts}
        first = {**self._parts[0], "state": self._current.get_state()}
        return {PARTS: [first, *itertools.islice(self._parts, 1, None)]}

    def set_state(self, state: dict[str, Any]) -> None:
        self.release()
        self._parts = list(state[PARTS])
        if self._parts and self._parts[0]["state"] is not None:
            self._open()  # at once, to refuse a state that no longer fits the files

    def release(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current.close()
