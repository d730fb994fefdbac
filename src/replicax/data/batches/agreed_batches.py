"""Agreement of the workers on each global batch, so that all take the same number of steps.

Each worker announces what it has read (an :class:`~replicax.data.batches.announcements.Announcement`), or that it could
not read its part, as the others would wait for it. An exchange may take as long as several small steps. So it covers
everything that a worker has ready at its start: during an exchange each worker reads on, and announces that in the
next. No worker waits for a second element before it announces the first.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from replicax.data.batches.announcements import (
    Announcement,
    check_read,
    check_same_batch,
    check_same_structure,
    in_words,
    structure_of_others,
)
from replicax.data.batches.global_batches import GlobalBatches
from replicax.data.batches.local_batches import END, HostBatch, LocalBatches
from replicax.data.batches.prefetch import Prefetcher
from replicax.data.batches.rows import Leaf, no_rows
from replicax.data.options import PartialBatch
from replicax.workers.codec import dumps, loads
from replicax.workers.exchange import Cancelled, Series

MOST_AHEAD = 32
"""How many local batches may wait on the host: with so many to an exchange, its time hardly matters."""
_MOST_BYTES = 16 * 1024 * 1024
"""The largest size of these together, in bytes. Steps on larger ones take longer than an exchange."""


class AgreedBatches(GlobalBatches):
    """Global batches on which workers agree.

    With ``one_stream`` all workers should have the same batches, and end together. Otherwise each reads batches of its
    own, and a worker whose stream has ended has parts of size 0. Workers read on during an exchange if they may read
    ``ahead``; otherwise there is an exchange for each element. The ``others`` are :class:`GlobalBatches`' arguments.
    """

    _local_batches: Prefetcher

    def __init__(
        self, exchange: Series, one_stream: bool, ahead: bool, local_batches: LocalBatches, *others: Any
    ) -> None:
        super().__init__(Prefetcher(local_batches, MOST_AHEAD if ahead else 0, _MOST_BYTES), *others)
        self._exchange = exchange
        self._one_stream = one_stream
        self._settled = 0
        # What each worker has announced and is not used yet. The announcement of its end stays there.
        self._told: list[collections.deque[Announcement]] = [collections.deque() for _ in range(exchange.workers.count)]
        self._last: tuple[Any, tuple[Leaf, ...]] | None = None  # structure and kinds of the last announcement
        self._first_kinds: tuple[Leaf, ...] | None = None
        self._empty: HostBatch | None = None

    def _agreed_announcements(self) -> list[Announcement]:
        """The announcements of all workers for the next element; raises if one could not read it."""
        while not all(self._told):  # all workers know the same, so either all exchange or none does
            self._tell()
        everyone = [told[0] if told[0].is_over else told.popleft() for told in self._told]
        check_read(everyone, self._where())
        self._settled += 1
        return everyone

    def _tell(self) -> None:
        """Announce what there is, or the error, and receive the announcements of the others."""
        try:
            news = self._news()
        except Cancelled:
            raise
        except Exception as error:
            self._exchange_news([Announcement.of_error(error)])
            raise
        self._exchange_news(news)

    def _news(self) -> list[Announcement]:
        """New announcements: at least one, unless the others already have one that is not used yet.

        An error waits until its element is the next one: only then its number is known, as elements may be left out.
        """
        told = self._told[self._exchange.workers.index]
        local_batches = self._local_batches.waiting(0 if told else 1)
        if self.closing:
            raise Cancelled
        if not local_batches:
            self._local_batch()  # raises the dataset's error
        new = local_batches[len(told) :]
        return [self._ending() if local_batch is END else self._announcement(local_batch) for local_batch in new]

    def _exchange_news(self, news: Sequence[Announcement]) -> None:
        runs = [(announcement, len(list(alike))) for announcement, alike in itertools.groupby(news)]
        everyone = self._exchange.exchange(dumps(runs), is_cancelled=lambda: self.closing, number=self._settled)
        for told, data in zip(self._told, everyone, strict=True):
            told.extend(announcement for announcement, count in loads(data) for _ in range(count))

    def _next_divided(self) -> HostBatch | None:
        division = self._division
        announcements = self._agreed_announcements()
        if self._one_stream:
            check_same_batch(announcements, self._where())
            return super()._next_divided()
        if self._first_kinds is None:
            check_same_structure(announcements, self._where())
        over = [worker.is_over for worker in announcements]
        if all(over) or (any(over) and division.partial is PartialBatch.DROP):
            return None
        if self._first_kinds is None:
            self._first_kinds = next(kind for worker in announcements for kind in worker.kinds)
        sizes = tuple(size for worker in announcements for size in worker.sizes)
        kinds = tuple(kind for worker in announcements for kind in worker.kinds_of_replicas(self._first_kinds))
        same_rows = len(set(kinds)) == 1
        if not same_rows and division.partial is PartialBatch.PAD:
            kinds_of_workers = [(w, worker.kinds) for w, worker in enumerate(announcements) if worker.kinds]
            raise ValueError(
                f"{self._where()} has rows of different shapes or dtypes on the workers, and "
                "partial_batch='pad' makes one array of them: "
                + "; ".join(f"worker {w} has {in_words(worker_kinds)}" for w, worker_kinds in kinds_of_workers)
            )
        if self._rows is None:
            self._rows = (max(sizes),) * len(sizes) if division.whole else self._full_sizes(announcements)
        local_batch = self._local_batch()
        if local_batch is END:
            local_batch = self._nothing(announcements)
        return dataclasses.replace(local_batch, sizes=sizes, kinds=None if same_rows else kinds)

    def _full_sizes(self, announcements: Sequence[Announcement]) -> tuple[int, ...]:
        """The sizes of a full element: of workers that read equally many examples, one may have a short first batch."""
        largest: dict[tuple[int, int], tuple[int, ...]] = {}
        kinds = [(n, len(w.sizes)) for n, w in zip(self._division.examples_of_workers, announcements, strict=True)]
        for kind, worker in zip(kinds, announcements, strict=True):
            largest[kind] = max(worker.sizes, largest.get(kind, ()), key=sum)
        return tuple(size for kind in kinds for size in largest[kind])

    def _announcement(self, local_batch: HostBatch) -> Announcement:
        """The announcement of a local batch."""
        kinds = tuple(part.kinds() for part in local_batch.parts)
        announcement = Announcement(local_batch.sizes, kinds if len(set(kinds)) > 1 else kinds[:1], is_over=False)
        if self._last is None and not self._one_stream:
            announcement = announcement.with_structure(local_batch.tree, local_batch.parts[0])
        self._last = local_batch.tree, kinds[0]
        return announcement

    def _ending(self) -> Announcement:
        """The announcement for every element after the last local batch."""
        if self._one_stream:
            return Announcement()
        return Announcement((0,) * len(self._division.mine), () if self._last is None else (self._last[1],))

    def _nothing(self, announcements: Sequence[Announcement]) -> HostBatch:
        """Arrays of size 0, like the last that this worker had, or else like the first of another worker."""
        if self._empty is None:
            tree, kinds = self._last or structure_of_others(announcements, self._where())
            count = len(self._division.mine)
            self._empty = HostBatch(tree, [no_rows(kinds)] * count, (0,) * count)
        return self._empty
