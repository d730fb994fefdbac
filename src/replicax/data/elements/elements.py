"""Elements: from the batches that a worker reads to what a step gets.

Each batch is divided over the worker's replicas. Where workers read streams of their own they agree on every element,
so that all take the same number of steps, and know when replicas have different sizes.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from replicax.data.elements.announcements import (
    Announcement,
    check_read,
    check_same_batch,
    check_same_structure,
    in_words,
    structure_of_others,
)
from replicax.data.elements.batch_rows import BatchRows, Checker, Leaf, filled_up, no_rows
from replicax.data.elements.chunks import Chunk
from replicax.data.elements.staging import Staged
from replicax.data.input_context import shares
from replicax.data.input_options import PartialBatch
from replicax.data.reading.batches import OwnRows
from replicax.execution.many_steps.element_groups import Single
from replicax.workers.codec import dumps, loads
from replicax.workers.exchange import CalledOff, Series


@dataclasses.dataclass(frozen=True)
class Division:
    """How batches are divided.

    Attributes:
      replicas: how many there are on all workers.
      mine: which of them are this worker's.
      partial: what to do with what is no full batch.
      exchange: how workers agree on each element; ``None`` if all have the same stream, of a length that is known.
      shared: whether all have the same stream.
      whole: whether a batch is one replica's, rather than one for all.
      rows: what each replica gets of a full batch; ``None``: as much as of the first.
      new: whether each batch is in new arrays that nobody else has.
    """

    replicas: int
    mine: range
    partial: PartialBatch
    exchange: Series | None = None
    shared: bool = False
    whole: bool = False
    rows: tuple[int, ...] | None = None
    new: bool = False


@dataclasses.dataclass(frozen=True)
class Element:
    """One element, on the host.

    Attributes:
      tree: its structure.
      parts: what each of this worker's replicas has.
      sizes: how many examples each replica of all workers has.
      alike: whether all replicas have arrays of the same shapes.
      same_rows: whether these differ in the number of rows only.
      filled: the arrays ``[len(parts), rows, …]`` of a padded element; else ``None``.
      together: all parts, one after the other, in arrays that nobody else has; ``None`` if they have to be copied,
        because the dataset may fill them again.
    """

    tree: Any
    parts: list[BatchRows]
    sizes: tuple[int, ...]
    alike: bool
    same_rows: bool = True
    filled: list[Any] | None = None
    together: BatchRows | None = None


_NOTHING: Any = object()
"""In place of a batch, at the end; None is a batch, if a wrong one."""


class Elements(grain.DatasetIterator):
    """The elements of one pass, each given to ``place``.

    Args:
      batches: what this worker reads.
      division: how it is divided.
      place: what becomes of each :class:`Element`.
      position: the number of the first element, for messages.
    """

    def __init__(
        self, batches: Any, division: Division, place: Callable[[Element | Staged], Any], position: int = 0
    ) -> None:
        super().__init__(batches)
        self._division = division
        self._place = place
        self._checker = Checker(division.replicas)
        self._rows = division.rows
        self._kinds: tuple[Leaf, ...] | None = None
        self._position = position
        self._is_over = False
        self._is_first = True
        self._left = 0
        self._held: tuple[Element | Exception, bytes] | None = None
        self._spare: BatchRows | None = None
        self.closing = False
        """Set when nobody wants the element any more that is just being made."""
        self.is_placing = False
        """Whether ``place`` is at work."""
        self.steps: int | None = None
        """How many elements to give at once, as a :class:`Chunk`; ``None``: each on its own. Set from any thread."""
        self._of_steps: int | None = None

    def __next__(self) -> Any:
        self._assert_not_closed()
        steps = self.steps
        if steps is not None:
            return self._several(steps)
        return self._placed(self._next_element())

    def _next_element(self) -> Element:
        if self._held is not None:
            (held, _), self._held = self._held, None
            if isinstance(held, Exception):
                raise held
            return held
        while not self._is_over:
            element = self._divided()
            if element is None:
                self._is_over = True
            elif self._division.partial is PartialBatch.DROP and element.sizes != self._rows:
                continue
            else:
                self._position += 1
                return element
        raise StopIteration

    def state_kept(self) -> bytes:
        """The state as it is now, pickled, whatever becomes of its parts."""
        return pickle.dumps(self.get_state())

    def _placed(self, element: Element | Staged) -> Any:
        self.is_placing = True
        try:
            if self.closing:
                raise CalledOff
            return self._place(element)
        finally:
            self.is_placing = False

    def _several(self, steps: int) -> Chunk:
        """The next elements of one kind, at most so many that ``steps`` are complete."""
        if self._of_steps != steps or not self._left:
            self._of_steps, self._left = steps, steps
        states = [self.state_kept()]
        first = self._next_element()
        states.append(self.state_kept())
        if not first.alike:
            self._left -= 1
            return Chunk(Single(self._placed(first)), states)
        staged = Staged(first, self._left)
        while staged.count < self._left:
            try:
                element = self._next_element()
            except StopIteration:
                break
            except Exception as error:  # after those that have come before it
                self._held = error, states[-1]
                break
            if not staged.takes(element):
                self._held = element, states[-1]
                break
            staged.add(element)
            states.append(self.state_kept())
        self._left -= staged.count
        return Chunk(self._placed(staged), states)

    def get_state(self) -> dict[str, Any]:
        if self._held is not None:
            state: dict[str, Any] = pickle.loads(self._held[1])
            return state
        rows = None if self._rows is None else list(self._rows)
        return {"batches": self._parent.get_state(), "position": self._position, "rows": rows}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["batches"])
        self._position = state["position"]
        self._is_over = False
        self._held = None

    # --- dividing ---------------------------------------------------------------------------------------

    def _divided(self) -> Element | None:
        """The next element; ``None`` if no worker has anything left."""
        division = self._division
        together, same_rows = None, True
        if division.exchange is None or division.shared:
            taken = self._rows_of_all() if division.exchange is None else self._agreed_on(division.exchange)
            if taken is None:
                return None
            rows, sizes = taken
            parts = _cut(rows, 0, sizes[division.mine.start : division.mine.stop])
            # Grain makes a batch of one example without copying it.
            together = rows if division.new and rows.size > 1 else None
            alike = len(set(sizes)) == 1
        else:
            parts, is_over = self._or_told(division.exchange, self._take_of_own)
            announcements = self._agreed(division.exchange, parts, is_over)
            over = [worker.is_over for worker in announcements]
            if all(over) or (any(over) and division.partial is PartialBatch.DROP):
                return None
            sizes = tuple(size for worker in announcements for size in worker.sizes)
            kinds = {kind for worker in announcements for kind in worker.kinds}
            same_rows = len(kinds) == 1
            alike = same_rows and len(set(sizes)) == 1
            if len(kinds) > 1 and division.partial is PartialBatch.PAD:
                there = [(w, worker.kinds) for w, worker in enumerate(announcements) if worker.kinds]
                having = (f"worker {w} has {in_words(theirs)}" for w, theirs in there)
                raise ValueError(
                    f"{self._where()} has rows of different shapes or dtypes on the workers, and "
                    f"partial_batch='pad' makes one array of them: {'; '.join(having)}"
                )
            parts = parts or self._nothing(announcements)
        if self._rows is None:
            self._rows = (max(sizes),) * len(sizes) if division.whole else sizes
        filled = None
        if division.partial is PartialBatch.PAD:
            filled, alike = self._filled(parts, sizes), True
        return Element(self._checker.tree, parts, sizes, alike, same_rows, filled, together)

    def _or_told(self, exchange: Series, take: Callable[[], Any]) -> Any:
        """What ``take`` gives; if it fails the others are told, as they would wait."""
        try:
            return take()
        except Exception as error:
            self._tell(exchange, Announcement.of_error(error))
            raise

    def _agreed_on(self, exchange: Series) -> tuple[BatchRows, tuple[int, ...]] | None:
        """This worker's rows of a batch that all workers have, after seeing that they have the same."""
        taken = self._or_told(exchange, self._rows_of_all)
        rows, sizes = taken or (None, ())
        own = Announcement(sizes, () if rows is None else (rows.kinds(),), taken is None)
        check_same_batch(self._told(exchange, own), self._where())
        return taken

    def _rows_of_all(self) -> tuple[BatchRows, tuple[int, ...]] | None:
        """This worker's rows of a batch that all workers have."""
        batch = next(self._parent, _NOTHING)
        if batch is _NOTHING:
            return None
        own = isinstance(batch, OwnRows)
        rows = self._checker.rows(batch.rows if own else batch, self._where())
        sizes = shares(batch.size if own else rows.size, self._division.replicas)
        mine = self._division.mine
        start = 0 if own else sum(sizes[: mine.start])
        return rows.part(start, sum(sizes[mine.start : mine.stop])), tuple(sizes)

    def _take_of_own(self) -> tuple[list[BatchRows], bool]:
        """This worker's rows of a stream of its own (none, if there never were any), and whether there are no more."""
        mine = self._division.mine
        if self._division.whole:
            parts = []
            for _ in mine:
                batch = next(self._parent, _NOTHING)
                if batch is _NOTHING:
                    break
                parts.append(self._checker.rows(batch, self._where()))
            is_over = not parts
        else:
            batch = next(self._parent, _NOTHING)
            is_over = batch is _NOTHING
            rows = None if is_over else self._checker.rows(batch, self._where())
            parts = [] if rows is None else _cut(rows, 0, shares(rows.size, len(mine)))
        if parts:
            self._kinds = parts[0].kinds()
        if self._kinds is not None:
            parts += [no_rows(self._kinds)] * (len(mine) - len(parts))
        return parts, is_over

    def _agreed(self, exchange: Series, parts: list[BatchRows], is_over: bool) -> list[Announcement]:
        """What all workers have for this element."""
        tree = self._checker.tree
        sizes = tuple(part.size for part in parts) or (0,) * len(self._division.mine)
        announcement = Announcement(sizes, tuple({part.kinds() for part in parts}), is_over)
        if self._is_first and tree is not None:
            announcement = announcement.with_structure(tree, parts[0].kinds())
        everyone = self._told(exchange, announcement)
        if self._is_first:
            check_same_structure(everyone, self._where())
            self._is_first = False
        return everyone

    def _told(self, exchange: Series, announcement: Announcement) -> list[Announcement]:
        """What all workers have, if all could read their part."""
        everyone = self._tell(exchange, announcement)
        check_read(everyone, self._where())
        return everyone

    def _tell(self, exchange: Series, announcement: Announcement) -> list[Announcement]:
        return [loads(data) for data in exchange.exchange(dumps(announcement), called_off=lambda: self.closing)]

    def _nothing(self, announcements: Sequence[Announcement]) -> list[BatchRows]:
        """Size-0 arrays for this worker's replicas, which never had anything."""
        self._checker.tree, self._kinds = structure_of_others(announcements, self._where())
        return [no_rows(self._kinds)] * len(self._division.mine)

    def _filled(self, parts: list[BatchRows], sizes: tuple[int, ...]) -> list[Any]:
        assert self._rows is not None
        rows = max(self._rows)
        if max(sizes) > rows:
            raise ValueError(
                f"{self._where()} has {max(sizes)} examples for a replica, after elements of {rows}: "
                "partial_batch='pad' fills up to the size of a full batch, and has room for no more"
            )
        having = next((part for part in parts if part.size), None)
        if having is not None:
            row = having.part(having.size - 1, 1)
            # A copy, as buffers may be filled again.
            self._spare = BatchRows([np.array(leaf) for leaf in row.leaves], 1)
        spare = self._spare
        if spare is None or spare.kinds() != parts[0].kinds():
            spare = no_rows(parts[0].kinds())
        return filled_up(parts, rows, spare)

    def _where(self) -> str:
        return f"element {self._position}"


def _cut(rows: BatchRows, start: int, sizes: Sequence[int]) -> list[BatchRows]:
    parts = []
    for size in sizes:
        parts.append(rows.part(start, size))
        start += size
    return parts
