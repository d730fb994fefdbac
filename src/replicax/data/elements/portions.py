"""Portions: what one worker reads for each element, before it is known what the others have."""

from __future__ import annotations

import abc
import dataclasses
import pickle
from typing import Any

from replicax._grain.nodes import OwnRows
from replicax.data.elements.batch_rows import BatchRows, Checker, no_rows, shares
from replicax.data.input_options import PartialBatch


@dataclasses.dataclass(frozen=True)
class Division:
    """How batches are divided.

    Attributes:
      source: what the dataset is, for messages.
      replicas: how many there are on all workers.
      mine: which of them are this worker's.
      partial: what to do with a batch that is not full.
      whole: whether a batch is one replica's, rather than one for all.
      examples: whether it is one example of a replica's, whose arrays need have no rows.
      rows: what each replica gets of a full batch; ``None``: as much as of the first.
      new: whether each batch is in new arrays that nobody else has.
    """

    source: str
    replicas: int
    mine: range
    partial: PartialBatch
    whole: bool = False
    examples: bool = False
    rows: tuple[int, ...] | None = None
    new: bool = False


@dataclasses.dataclass(frozen=True)
class Portion:
    """What this worker has read for one element.

    Attributes:
      tree: the structure.
      parts: what each of its replicas gets.
      sizes: how many rows each replica gets: of all workers, if they read the same batches; else of this worker.
      together: all parts, one after the other, in arrays that nobody else has; ``None`` if they have to be copied,
        because the dataset may fill them again.
      held: the rows whose memory it keeps: all of a batch, if the parts are views of it.
    """

    tree: Any
    parts: list[BatchRows]
    sizes: tuple[int, ...]
    together: BatchRows | None
    held: list[BatchRows]

    @property
    def nbytes(self) -> int:
        """How much memory it keeps, in bytes."""
        return sum(rows.nbytes for rows in self.held)


END = Portion(None, [], (), None, [])
"""Comes after the last portion: the place at the end of the batches is not the one after the last of them."""


class UnfitBatchError(Exception):
    """A batch that can't be divided, or is not like the first.

    What is wrong with it is said when it is known which element it would be: who reads ahead can't know that, as
    others may leave elements out.

    Args:
      checker: that has refused it.
      batch: as it came.
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
        return self


class Portions(abc.ABC):
    """The portions of one pass, one after the other, and then :data:`END`.

    Args:
      batches: a Grain iterator over what this worker reads. It is closed with the portions.
      division: how batches are divided.
      ahead: whether a portion may wait while the next one is read. Then it is copied, unless its arrays are its own.
    """

    is_placing = False

    def __init__(self, batches: Any, division: Division, ahead: bool = False) -> None:
        self._batches = batches
        self._division = division
        # Also where an element consists of several batches, of which the first waits for the last.
        self._waits = ahead or (division.whole and len(division.mine) > 1)
        self._checker = Checker(division.replicas, division.examples)
        self._is_over = False

    def __next__(self) -> Portion:
        """The next one.

        Raises:
          StopIteration: there is none.
          UnfitBatchError: it can't be divided.
          Exception: whatever the dataset raised.
        """
        if self._is_over:
            raise StopIteration
        try:
            return self._next()
        except StopIteration:
            self._is_over = True
            return END

    @abc.abstractmethod
    def _next(self) -> Portion:
        """The same, without the end."""

    def state(self) -> bytes:
        """Where the batches are, pickled: Grain may go on to change the parts of a state."""
        return pickle.dumps(self._batches.get_state())

    def call_off(self) -> None:
        """Nothing to do: here is no waiting but for the dataset."""
        return  # which can't be called off

    def close(self) -> None:
        """End what reads the batches."""
        self._batches.close()

    def _rows(self, batch: Any) -> BatchRows:
        try:
            return self._checker.rows(batch, "a batch")
        except Exception as error:
            raise UnfitBatchError(self._checker, batch) from error

    def _own(self, rows: BatchRows, start: int, size: int) -> tuple[BatchRows, bool, BatchRows]:
        """``size`` rows of a batch; whether their arrays are nobody else's; and the rows whose memory they keep."""
        own = rows.part(start, size)
        # Grain makes a batch of one example without copying it.
        if self._division.new and size > 1:
            return own, True, rows
        if not self._waits:
            return own, False, rows
        copy = own.copied()
        return copy, copy.is_numpy, copy


class PortionsOfOneStream(Portions):
    """Each a worker's rows of a batch that all workers have."""

    def _next(self) -> Portion:
        batch = next(self._batches)
        are_own = isinstance(batch, OwnRows)
        rows = self._rows(batch.rows if are_own else batch)
        sizes = shares(batch.size if are_own else rows.size, self._division.replicas)
        mine = self._division.mine
        its = sizes[mine.start : mine.stop]
        own, is_new, held = self._own(rows, 0 if are_own else sum(sizes[: mine.start]), sum(its))
        return Portion(self._checker.tree, own.cut(its), tuple(sizes), own if is_new else None, [held])


class PortionsOfOwnStream(Portions):
    """Each a batch of a stream that only this worker reads, or a batch for each of its replicas."""

    def _next(self) -> Portion:
        replicas = len(self._division.mine)
        if not self._division.whole:
            rows = self._rows(next(self._batches))
            sizes = shares(rows.size, replicas)
            own, is_new, held = self._own(rows, 0, rows.size)
            return Portion(self._checker.tree, own.cut(sizes), tuple(sizes), own if is_new else None, [held])
        parts: list[BatchRows] = []
        kept: list[BatchRows] = []
        while len(parts) < replicas and (batch := next(self._batches, _NO_BATCH)) is not _NO_BATCH:
            rows = self._rows(batch)
            part, _, held = self._own(rows, 0, rows.size)
            parts.append(part)
            kept.append(held)
        if not parts:
            raise StopIteration
        parts += [no_rows(parts[0].kinds())] * (replicas - len(parts))
        return Portion(self._checker.tree, parts, tuple(part.size for part in parts), None, kept)


_NO_BATCH: Any = object()
"""Stands for the end of the batches. ``None`` can't: a dataset may give it, and that is an error."""
