"""Local batches: what one worker reads for each element, before it knows what the others have."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any, Protocol

import jax
import numpy as np

from replicax._grain.nodes import OwnRows
from replicax.data.batches.rows import BatchRows, Checker, Leaf, no_rows, rows_per_replica
from replicax.data.options import PartialBatch


@dataclasses.dataclass(frozen=True)
class Division:
    """The division of batches over replicas."""

    source: str  # a description of the dataset, for messages
    replicas: int  # the number on all workers
    mine: range  # this worker's replicas
    partial: PartialBatch  # what to do with a batch that is not full
    whole: bool  # whether a batch is for one replica, rather than for all
    examples: bool  # whether it is one example of a replica, whose arrays need have no rows
    # Each replica's number of rows of a full batch; ``None``: as many as of the first batch.
    rows: tuple[int, ...] | None
    # How many examples of a batch each worker reads; empty if all read the same batches.
    examples_of_workers: tuple[int, ...]
    new: bool  # whether each batch is in new arrays that no other code holds


@dataclasses.dataclass(frozen=True)
class HostBatch:
    """This worker's part of one element, on the host."""

    tree: Any  # the structure
    parts: list[BatchRows]  # the rows of each of its replicas
    # The number of rows of each replica of all workers; until these agree, if each reads batches of its own, of each of
    # this worker's replicas.
    sizes: tuple[int, ...]
    # All parts, concatenated, in arrays that no other code holds; ``None`` if the parts have to be copied, because the
    # dataset may fill their arrays again.
    joined: BatchRows | None = None
    nbytes: int = 0  # the memory that it keeps, in bytes: that of all of a batch, if the parts are views of it
    # For each replica of all workers, shape and dtype of each leaf's rows; ``None``: the same for all.
    kinds: tuple[tuple[Leaf, ...], ...] | None = None
    filled: list[Any] | None = None  # the arrays ``[len(parts), rows, …]`` of a padded element; else ``None``

    @property
    def alike(self) -> bool:
        """Return whether all replicas have arrays of the same shapes."""
        return self.filled is not None or (self.kinds is None and len(set(self.sizes)) == 1)

    @property
    def columns(self) -> list[Any]:
        """Return, for each leaf, the arrays of this worker's replicas."""
        return list(zip(*(part.leaves for part in self.parts), strict=True)) if self.filled is None else self.filled

    @property
    def shapes(self) -> list[tuple[tuple[int, ...], ...]]:
        """Return, for each leaf, its shape on each replica of all workers."""
        kinds = (self.parts[0].kinds(),) * len(self.sizes) if self.kinds is None else self.kinds
        sizes = [() if self.parts[0].is_example else (size,) for size in self.sizes]
        return [
            tuple((*size, *shape) for size, (shape, _) in zip(sizes, leaf, strict=True))
            for leaf in zip(*kinds, strict=True)
        ]


END = HostBatch(None, [], ())
"""Follows the last local batch: the place at the end of the batches differs from the place after the last one."""


class UnfitBatchError(Exception):
    """A batch that can't be divided, or is not like the first.

    The message needs the number of the element, which is unknown when the batch is read ahead, because others may leave
    elements out; so :meth:`named` makes it later.
    """

    def __init__(self, checker: Checker, batch: Any) -> None:
        super().__init__("a batch that can't be divided")
        self._checker, self._batch = checker, batch

    def named(self, where: str) -> Exception:
        """The error for users; ``where`` is the element's name."""
        try:
            self._checker.rows(self._batch, where)
        except Exception as error:
            return error
        return self.__cause__ if isinstance(self.__cause__, Exception) else self  # one that does not come again


class LocalBatches:
    """The local batches of one pass, one after the other, and then :data:`END`.

    ``batches`` is a Grain iterator, which is closed with this object. With ``one_stream`` all workers read it, and this
    one takes its rows of each batch. A batch that may wait while the next one is read (``ahead``) is copied, unless its
    arrays are its own.
    """

    is_placing = False

    def __init__(self, batches: Any, division: Division, one_stream: bool = True, ahead: bool = False) -> None:
        self._batches = batches
        self._division = division
        self._replicas, self._mine = division.replicas, division.mine
        if not one_stream:
            self._replicas, self._mine = len(division.mine), range(len(division.mine))
        # Also if an element consists of several batches, the first of which waits for the last.
        self._waits = ahead or (division.whole and len(division.mine) > 1)
        self._checker = Checker(division.replicas, division.examples, division.source)
        self._is_over = False

    def __next__(self) -> HostBatch:
        """The next local batch; raises :class:`UnfitBatchError` if it can't be divided."""
        if self._is_over:
            raise StopIteration
        try:
            return self._several() if self._division.whole else self._one()
        except StopIteration:
            self._is_over = True
            return END

    def _one(self) -> HostBatch:
        """The rows of a batch for this worker's replicas."""
        batch = next(self._batches)
        are_own = isinstance(batch, OwnRows)
        rows = self._rows(batch.rows if are_own else batch)
        sizes = rows_per_replica(batch.size if are_own else rows.size, self._replicas)
        mine = sizes[self._mine.start : self._mine.stop]
        own, joined, nbytes = self._own_part(rows, 0 if are_own else sum(sizes[: self._mine.start]), sum(mine))
        return HostBatch(self._checker.tree, own.cut(mine), tuple(sizes), joined, nbytes)

    def _several(self) -> HostBatch:
        """A batch for each of this worker's replicas."""
        replicas = len(self._mine)
        parts: list[BatchRows] = []
        while len(parts) < replicas and (batch := next(self._batches, _NO_BATCH)) is not _NO_BATCH:
            rows = self._rows(batch)
            parts.append(self._own_part(rows, 0, rows.size)[0])
        if not parts:
            raise StopIteration
        parts += [no_rows(parts[0].kinds())] * (replicas - len(parts))
        memory = sum(part.nbytes for part in parts)
        return HostBatch(self._checker.tree, parts, tuple(part.size for part in parts), None, memory)

    def state(self) -> bytes:
        """The place of the batches, pickled: Grain may later change parts of a state in place."""
        return pickle.dumps(self._batches.get_state())

    def cancel(self) -> None:
        """Do nothing: it waits only for the dataset, and that can't be cancelled."""
        return

    def close(self) -> None:
        """Close the reader of the batches."""
        self._batches.close()

    def _rows(self, batch: Any) -> BatchRows:
        try:
            return self._checker.rows(batch, "a batch")
        except Exception as error:
            raise UnfitBatchError(self._checker, batch) from error

    def _own_part(self, rows: BatchRows, start: int, size: int) -> tuple[BatchRows, BatchRows | None, int]:
        """``size`` rows of a batch; the same if no other code holds their arrays; and the memory that they keep."""
        own = rows.part(start, size)
        # Grain makes a batch of one example without copying it.
        if self._division.new and size > 1:
            return own, own, rows.nbytes
        if not self._waits:
            return own, None, rows.nbytes
        # A copy, which the dataset can't fill again. On CPUs JAX may use a NumPy array's memory for its own array, and
        # copies in the background.
        leaves = jax.block_until_ready([leaf.copy() for leaf in own.leaves])
        copy = BatchRows(leaves, own.size, own.is_example)
        return copy, copy if all(isinstance(leaf, np.ndarray) for leaf in leaves) else None, copy.nbytes


_NO_BATCH: Any = object()
"""Marks the end of the batches. ``None`` can't: a dataset may return it, and that is an error."""


# --- groups of batches that are read together, and lie on the devices as one array ----------------------


class BatchGroup(Protocol):
    """Global batches of one kind, on the host, that are put on the devices together."""

    tree: Any
    is_padded: bool
    sizes: list[tuple[int, ...]]

    def stacks(self) -> list[np.ndarray[Any, Any]]:
        """Return, for each leaf, an array ``[this worker's replicas, batches, …]``."""


class HostGroup:
    """Global batches of one kind, in arrays ``[len(parts), room, …]`` on the host.

    Elements are copied when they are added, as the dataset may fill the same buffers again; each example is copied only
    once, as for a single element.
    """

    def __init__(self, first: HostBatch, room: int) -> None:
        self.tree = first.tree
        self.is_padded = first.filled is not None
        self.sizes: list[tuple[int, ...]] = []
        self._kind = _kind_of(first)
        columns = first.columns
        self._buffers = [np.empty((len(c), room, *c[0].shape), c[0].dtype) for c in columns]
        self.add(first)

    @property
    def count(self) -> int:
        """The number of elements."""
        return len(self.sizes)

    def takes(self, element: HostBatch) -> bool:
        """Return whether ``element`` can be added."""
        return element.alike and _kind_of(element) == self._kind

    def add(self, element: HostBatch) -> None:
        """Add an element."""
        for buffer, column in zip(self._buffers, element.columns, strict=True):
            for replica, leaf in enumerate(column):
                buffer[replica, self.count] = leaf
        self.sizes.append(element.sizes)

    def stacks(self) -> list[np.ndarray[Any, Any]]:
        """Return, for each leaf, an array ``[len(parts), count, …]``."""
        return [buffer[:, : self.count] for buffer in self._buffers]


def _kind_of(element: HostBatch) -> Any:
    return [(c[0].shape, c[0].dtype) for c in element.columns]
