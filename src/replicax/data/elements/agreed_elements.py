"""Elements on which workers agree, so that all take the same number of steps.

Each tells the others what it has (an :class:`~replicax.data.elements.announcements.Announcement`), or that it could not
read its part, as they would wait for it. An exchange may take as long as several small steps. So it is about all that a
worker has ready when it comes to it: while one exchange is under way, each worker reads on, and tells of that in the
next. Nobody waits for a second element in order to tell of a first.
"""

from __future__ import annotations

import abc
import collections
import itertools
from collections.abc import Sequence
from typing import Any

from replicax.data.elements.announcements import (
    Announcement,
    check_read,
    check_same_batch,
    check_same_structure,
    in_words,
    structure_of_others,
)
from replicax.data.elements.batch_rows import Leaf, no_rows
from replicax.data.elements.elements import Element, Elements
from replicax.data.elements.portions import END, Portion, Portions
from replicax.data.elements.prefetch import Prefetcher
from replicax.data.input_options import PartialBatch
from replicax.workers.codec import dumps, loads
from replicax.workers.exchange import CalledOff, Series

MOST_AHEAD = 32
"""How many portions may wait on the host: with so many to an exchange, its time hardly matters."""
_MOST_BYTES = 16 * 1024 * 1024
"""And how large they may be together. Steps on larger ones take longer than an exchange."""


class AgreedElements(Elements, abc.ABC):
    """Elements on which workers agree.

    Args:
      exchange: how workers tell each other.
      ahead: whether to read on while workers exchange; if not, there is an exchange for each element.
      portions: what this worker reads.
      others: as :class:`Elements` takes them.
    """

    _portions: Prefetcher

    def __init__(self, exchange: Series, ahead: bool, portions: Portions, *others: Any) -> None:
        super().__init__(Prefetcher(portions, MOST_AHEAD if ahead else 0, _MOST_BYTES), *others)
        self._exchange = exchange
        self._settled = 0
        # Of each worker what it has told, and what is not settled yet. The last that it can tell stays there.
        self._told: list[collections.deque[Announcement]] = [collections.deque() for _ in range(exchange.workers.count)]

    def _agreed(self) -> list[Announcement]:
        """What all workers have for the next element, if all could read it."""
        while not all(self._told):  # all workers know the same, so either all come to an exchange or nobody does
            self._tell()
        everyone = [told[0] if told[0].is_over else told.popleft() for told in self._told]
        check_read(everyone, self._where())
        self._settled += 1
        return everyone

    def _tell(self) -> None:
        """Tell the others what there is, also that it can't be read, and hear what they have."""
        try:
            news = self._news()
        except CalledOff:
            raise
        except Exception as error:
            self._exchanged([Announcement.of_error(error)])
            raise
        self._exchanged(news)

    def _news(self) -> list[Announcement]:
        """What there is that the others don't know: something, unless they know of an element that is not settled.

        An error waits until its element is the next one: only then its number is known, as elements may be left out.
        """
        told = self._told[self._exchange.workers.index]
        if told and told[-1].is_over:
            return []
        portions = self._portions.waiting(0 if told else 1)
        if self.closing:
            raise CalledOff
        if not portions:
            self._portion()  # raises what the dataset has raised
        new = portions[len(told) :]
        return [self._ending() if portion is END else self._announcement(portion) for portion in new]

    def _exchanged(self, news: Sequence[Announcement]) -> None:
        runs = [(announcement, len(list(alike))) for announcement, alike in itertools.groupby(news)]
        everyone = self._exchange.exchange(dumps(runs), called_off=lambda: self.closing, number=self._settled)
        for told, data in zip(self._told, everyone, strict=True):
            told.extend(announcement for announcement, count in loads(data) for _ in range(count))

    @abc.abstractmethod
    def _announcement(self, portion: Portion) -> Announcement:
        """What the others are told of it."""

    @abc.abstractmethod
    def _ending(self) -> Announcement:
        """What the others are told of every element after the last portion."""


class ElementsOfOneStream(AgreedElements):
    """The elements of batches that all workers should have alike; whether they do, and when they end, is compared."""

    def _divided(self) -> Element | None:
        check_same_batch(self._agreed(), self._where())
        return super()._divided()

    def _announcement(self, portion: Portion) -> Announcement:
        return Announcement(portion.sizes, (portion.parts[0].kinds(),), is_over=False)

    def _ending(self) -> Announcement:
        return Announcement()


class ElementsOfOwnStreams(AgreedElements):
    """The elements where each worker reads batches of its own. A worker whose stream has ended has parts of size 0."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._last: tuple[Any, tuple[Leaf, ...]] | None = None  # structure and kinds of what was told of last
        self._first_kinds: tuple[Leaf, ...] | None = None
        self._empty: Portion | None = None

    def _divided(self) -> Element | None:
        division = self._division
        announcements = self._agreed()
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
            there = [(w, worker.kinds) for w, worker in enumerate(announcements) if worker.kinds]
            raise ValueError(
                f"{self._where()} has rows of different shapes or dtypes on the workers, and "
                "partial_batch='pad' makes one array of them: "
                + "; ".join(f"worker {w} has {in_words(theirs)}" for w, theirs in there)
            )
        if self._rows is None:
            self._rows = (max(sizes),) * len(sizes) if division.whole else sizes
        portion = self._portion()
        if portion is END:
            portion = self._nothing(announcements)
        if same_rows:
            return Element(portion.tree, portion.parts, sizes, len(set(sizes)) == 1, together=portion.together)
        return Element(portion.tree, portion.parts, sizes, False, kinds)

    def _announcement(self, portion: Portion) -> Announcement:
        kinds = tuple(part.kinds() for part in portion.parts)
        announcement = Announcement(portion.sizes, kinds if len(set(kinds)) > 1 else kinds[:1], is_over=False)
        if self._last is None:
            announcement = announcement.with_structure(portion.tree, portion.parts[0])
        self._last = portion.tree, kinds[0]
        return announcement

    def _ending(self) -> Announcement:
        return Announcement((0,) * len(self._division.mine), () if self._last is None else (self._last[1],))

    def _nothing(self, announcements: Sequence[Announcement]) -> Portion:
        """Arrays of size 0, like the last that this worker had; if it never had any, like the first of others."""
        if self._empty is None:
            tree, kinds = self._last or structure_of_others(announcements, self._where())
            count = len(self._division.mine)
            self._empty = Portion(tree, [no_rows(kinds)] * count, (0,) * count, None, [])
        return self._empty
