"""Our own nodes for Grain's graphs, and the interface of Grain's classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grain
from grain import experimental

from replicax._grain import graph
from replicax._grain.installed import READS_SEVERAL


class Iterator(grain.DatasetIterator):
    """An iterator without a parent; once it ``is_closed``, its ``__next__`` must raise :meth:`closed_error`."""

    is_closed = False
    _closed = True  # Grain's: what ``close`` finds if an interrupt came before ``__init__`` has set it

    def closed_error(self) -> ValueError:
        """The error that there is no next element."""
        return ValueError(f"{self} was closed, so there is no next element: make another iterator of the dataset")

    def release(self) -> None:
        """Free its resources. May be called again, and before ``__init__`` has ended."""

    def close(self) -> None:
        super().close()
        self.is_closed = True
        self.release()


class Iterated(grain.IterDataset):
    """A dataset whose passes are our own iterators."""

    def __init__(self, iterator: Callable[..., Iterator], *arguments: Any) -> None:
        super().__init__()
        self._iterator = iterator
        self._arguments = arguments

    def __iter__(self) -> Iterator:
        return self._iterator(*self._arguments)


class OwnRows:
    """The rows of a batch for a worker's replicas."""

    def __init__(self, rows: Any, size: int) -> None:
        self.rows = rows  # a pytree of arrays; with one row if there is none: no batch of no examples can be made
        self.size = size  # of the whole batch


class Batches(grain.MapDataset):
    """The batches of one of Grain's nodes, ``batch``, read in another way.

    With ``own``, which returns the first row of this worker and the number of its rows for a batch of so many rows,
    elements are :class:`OwnRows`. If they are ``batched``, all examples of a batch are requested in one call, instead
    of one by one as Grain does; a class derived from one of Grain's may not support such calls.
    """

    def __init__(self, batch: Any, own: Callable[[int], tuple[int, int]] | None, batched: bool) -> None:
        super().__init__(graph.parent(batch))
        self._length = len(batch)
        self._read = graph.parent(batch)
        self._examples, self._size, self._stack = len(self._read), graph.batch_size(batch), batch._batch_fn
        self._own = own
        self._batched = batched and READS_SEVERAL

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        epoch, number = divmod(index, self._length)
        first = number * self._size
        rows = min(self._examples - first, self._size)
        start, count = (0, rows) if self._own is None else self._own(rows)
        start, count = min(start, rows - 1), max(1, count)
        start += first + epoch * self._examples
        numbers = range(start, start + count)
        read = self._read._getitems(list(numbers)) if self._batched else [self._example(i) for i in numbers]
        batch = self._stack(read)
        return batch if self._own is None else OwnRows(batch, rows)

    def _example(self, number: int) -> Any:
        try:
            return self._read[number]
        except Exception as error:
            error.add_note(
                f"(raised by example {number} of the dataset, counted from 0, in the order that it is read in)"
            )
            raise


def rebatched(dataset: Any, rows: int) -> Any:
    """A dataset of batches with so many rows, made of one with other batches."""
    kind = getattr(experimental, "RebatchIterDataset", None)
    if kind is None:
        raise RuntimeError(
            f"a dataset whose batches are not Grain's can't be read in batches of {rows} rows, as this version of "
            "Grain has no experimental.RebatchIterDataset. Batch its examples with dataset.batch(…), or install "
            "grain==0.2.18."
        )
    return kind(dataset, rows)


def with_batched_reads(root: Any) -> Any:
    """A root node with the same examples, which supports requests for several at once.

    Grain's own does bookkeeping for each example, which takes 10 µs: more than reading it from memory.
    """
    source = graph.source_of(root)
    return _Examples(source) if graph.only_selects([root]) and not _reads_several(source) else root


def _reads_several(source: Any) -> bool:
    """Return whether a source has Grain's method for several examples, as specific as its ``__getitem__``.

    A method that it inherits from a base class of the one with ``__getitem__`` ignores that one.
    """
    if isinstance(source, grain.MapDataset):  # functions may be part of it
        return False
    base = next(base for base in type(source).__mro__ if not {"_getitems", "__getitem__"}.isdisjoint(vars(base)))
    return "_getitems" in vars(base)


class _Examples(grain.MapDataset):
    """The examples of a random-access source."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> Any:
        return self.slice(index) if isinstance(index, slice) else self._source[index % len(self._source)]

    def _getitems(self, indices: Sequence[int]) -> list[Any]:
        source, length = self._source, len(self._source)
        return [source[i % length] for i in indices]
