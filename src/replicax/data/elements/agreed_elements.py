"""Elements on which workers agree one by one, so that all take the same number of steps.

Each tells the others what it has (an :class:`~replicax.data.elements.announcements.Announcement`), or that it could not
read its part, as they would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from replicax.data.elements.announcements import (
    Announcement,
    check_read,
    check_same_batch,
    check_same_structure,
    in_words,
    structure_of_others,
)
from replicax.data.elements.batch_rows import BatchRows, Leaf, no_rows, shares
from replicax.data.elements.elements import NO_BATCH, Element, Elements
from replicax.data.input_options import PartialBatch
from replicax.workers.codec import dumps, loads
from replicax.workers.exchange import Series


class AgreedElements(Elements):
    """Elements on which workers agree.

    Args:
      exchange: how workers tell each other.
      others: as :class:`Elements` takes them.
    """

    def __init__(self, exchange: Series, *others: Any) -> None:
        super().__init__(*others)
        self._exchange = exchange

    def _or_told(self, take: Callable[[], Any]) -> Any:
        """What ``take`` gives; if it fails the others are told."""
        try:
            return take()
        except Exception as error:
            self._tell(Announcement.of_error(error))
            raise

    def _told(self, announcement: Announcement) -> list[Announcement]:
        """What all workers have, if all could read their part."""
        everyone = self._tell(announcement)
        check_read(everyone, self._where())
        return everyone

    def _tell(self, announcement: Announcement) -> list[Announcement]:
        everyone = self._exchange.exchange(dumps(announcement), called_off=lambda: self.closing)
        return [loads(data) for data in everyone]


class ElementsOfOneStream(AgreedElements):
    """The elements of batches that all workers should have alike; whether they do, and when they end, is compared."""

    def _rows_of_all(self) -> tuple[BatchRows, tuple[int, ...]] | None:
        taken = self._or_told(super()._rows_of_all)
        rows, sizes = taken or (None, ())
        own = Announcement(sizes, () if rows is None else (rows.kinds(),), taken is None)
        check_same_batch(self._told(own), self._where())
        return taken


class ElementsOfOwnStreams(AgreedElements):
    """The elements where each worker reads batches of its own. A worker whose stream has ended has parts of size 0."""

    def __init__(self, exchange: Series, *others: Any) -> None:
        super().__init__(exchange, *others)
        self._kinds: tuple[Leaf, ...] | None = None
        self._is_first = True

    def _divided(self) -> Element | None:
        division = self._division
        parts, is_over = self._or_told(self._own)
        announcements = self._agreed(parts, is_over)
        over = [worker.is_over for worker in announcements]
        if all(over) or (any(over) and division.partial is PartialBatch.DROP):
            return None
        sizes = tuple(size for worker in announcements for size in worker.sizes)
        some = next(kind for worker in announcements for kind in worker.kinds)
        kinds = tuple(kind for w in announcements for kind in w.kinds_of_replicas(some))
        same_rows = len(set(kinds)) == 1
        if not same_rows and division.partial is PartialBatch.PAD:
            there = [(w, worker.kinds) for w, worker in enumerate(announcements) if worker.kinds]
            raise ValueError(
                f"{self._where()} has rows of different shapes or dtypes on the workers, and "
                "partial_batch='pad' makes one array of them: "
                + "; ".join(f"worker {w} has {in_words(theirs)}" for w, theirs in there)
            )
        if self._rows is None:
            self._rows = (max(sizes),) * len(sizes) if division.whole else sizes
        parts = parts or self._nothing(announcements)
        if same_rows:
            return Element(self._checker.tree, parts, sizes, len(set(sizes)) == 1)
        return Element(self._checker.tree, parts, sizes, False, kinds)

    def _own(self) -> tuple[list[BatchRows], bool]:
        """The parts of this worker's replicas (none, if there never were any), and whether there are no more."""
        mine = self._division.mine
        wanted = len(mine) if self._division.whole else 1
        batches: list[BatchRows] = []
        while len(batches) < wanted and (batch := next(self._batches, NO_BATCH)) is not NO_BATCH:
            batches.append(self._checker.rows(batch, self._where()))
        parts = batches
        if batches and not self._division.whole:
            parts = batches[0].cut(shares(batches[0].size, len(mine)))
        if parts:
            self._kinds = parts[0].kinds()
        if self._kinds is not None:
            parts = parts + [no_rows(self._kinds)] * (len(mine) - len(parts))
        return parts, not batches

    def _agreed(self, parts: list[BatchRows], is_over: bool) -> list[Announcement]:
        """What all workers have for this element."""
        tree = self._checker.tree
        sizes = tuple(part.size for part in parts) or (0,) * len(self._division.mine)
        kinds = tuple(part.kinds() for part in parts)
        announcement = Announcement(sizes, kinds if len(set(kinds)) > 1 else kinds[:1], is_over)
        if self._is_first and tree is not None:
            announcement = announcement.with_structure(tree, parts[0])
        everyone = self._told(announcement)
        if self._is_first:
            check_same_structure(everyone, self._where())
            self._is_first = False
        return everyone

    def _nothing(self, announcements: Sequence[Announcement]) -> list[BatchRows]:
        """Size-0 arrays for this worker's replicas, which never had anything."""
        self._checker.tree, self._kinds = structure_of_others(announcements, self._where())
        return [no_rows(self._kinds)] * len(self._division.mine)
