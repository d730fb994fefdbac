"""Datasets that can only be gone through from the start, as Grain datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import numpy as np

from replicax.nests import known

_NOTHING: Any = object()


class Replayed(grain.IterDataset):
    """What a function that makes iterators yields; to get to a place in it, everything before is gone through.

    Args:
      make: makes an iterator over batches, always the same ones.
    """

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        super().__init__()
        self._make = make

    def __iter__(self) -> ReplayIterator:
        return ReplayIterator(self._make)


class ReplayIterator(grain.DatasetIterator):
    """One pass; its state is how many rows it has given, whatever batches they came in."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        super().__init__()
        self._make = make
        self._iterator: Iterator[Any] | None = None
        self._rows = 0
        self._skip = 0  # of those rows, how many are still to be gone past

    def __next__(self) -> Any:
        self._assert_not_closed()
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
        return jax.tree_util.tree_map(lambda leaf: leaf[skipped:], known(batch)) if skipped else batch

    def get_state(self) -> dict[str, Any]:
        return {"rows": self._rows}

    def set_state(self, state: dict[str, Any]) -> None:
        self._release()
        self._rows = self._skip = int(state["rows"])

    def close(self) -> None:
        super().close()
        self._release()

    def _release(self) -> None:
        close = getattr(self._iterator, "close", None)  # a generator has one
        self._iterator = None
        if close is not None:
            close()


def count_rows(batch: Any) -> int:
    """Size of dim 0 of the first array of ``batch``; 0 if there is none."""
    leaf = next(iter(jax.tree_util.tree_leaves(known(batch))), None)
    shape = np.shape(leaf) if leaf is not None else ()
    return int(shape[0]) if shape else 0


class Loaded(grain.IterDataset):
    """A ``grain.DataLoader``, whose iterators have states of their own kind."""

    def __init__(self, loader: grain.DataLoader) -> None:
        super().__init__()
        self._loader = loader

    def __iter__(self) -> _LoaderIterator:
        return _LoaderIterator(self._loader)


class _LoaderIterator(grain.DatasetIterator):
    def __init__(self, loader: grain.DataLoader) -> None:
        super().__init__()
        self._iterator: Any = iter(loader)

    def __next__(self) -> Any:
        self._assert_not_closed()
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        return {"loader": self._iterator.get_state().decode()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._iterator.set_state(state["loader"].encode())

    def close(self) -> None:
        super().close()
        self._iterator = None  # a loader's iterator can't be closed: who drops it ends its threads and processes
