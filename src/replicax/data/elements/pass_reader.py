"""The pass that an iterator reads: one element at a time, or several together for ``run_steps``."""

from __future__ import annotations

import collections
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from replicax.data.elements.chunks import Chunk, joined_where_alike
from replicax.data.elements.prefetch import Prefetcher
from replicax.execution.many_steps.element_groups import ElementGroup, Single, group_of

if TYPE_CHECKING:
    from replicax.data.elements.elements import Elements
    from replicax.workers.replicas import Replicas


class PassReader:
    """A pass that is going on.

    Args:
      elements: what it reads.
      ahead: how many elements, or groups of them, wait on the devices.
      owner: the replicas that the elements are for.
    """

    def __init__(self, elements: Elements, ahead: int, owner: Replicas | None) -> None:
        self._elements = elements
        self._prefetcher = Prefetcher(elements, ahead)
        self._owner = owner
        # Elements that were read together and are not all given yet; and the state after the last one that was.
        self._left: collections.deque[Chunk] = collections.deque()
        self._state: bytes | None = None
        self._given = 0  # elements

    def next(self) -> Any:
        """The next element.

        Raises:
          StopIteration: there is none.
          Exception: whatever the dataset raised.
        """
        if not self._left:
            element = next(self._prefetcher)
            if not isinstance(element, Chunk):
                self._state = None
                self._given += 1
                return element
            self._left.append(element)
        chunk = self._first(1)
        self._state = chunk.states[-1]
        return chunk.group.elements()[0]

    def take(self, steps: int, staged: bool) -> tuple[list[Chunk], Exception | None]:
        """The next elements, and what is wrong with the one after them if an error stands there.

        Args:
          steps: how many; fewer if there are no more.
          staged: whether to read so many together from now on, so that the next calls find them in one chunk.

        Raises:
          StopIteration, Exception: as :meth:`next`, if there is no element before.
        """
        if staged:
            self._elements.together = steps, self._given
        chunks: list[Chunk] = []
        while steps:
            try:
                if not self._left:
                    self._left.append(self._received(staged))
            except Exception as error:
                if not chunks:
                    raise
                return chunks, None if isinstance(error, StopIteration) else error
            chunks.append(self._first(steps))
            self._state = chunks[-1].states[-1]
            steps -= chunks[-1].group.count
        return chunks, None

    def give_back(self, chunks: Sequence[Chunk]) -> None:
        """These, the last of what was given, come next again."""
        if chunks:
            self._left.extendleft(reversed(chunks))
            self._given -= sum(chunk.group.count for chunk in chunks)
            self._state = chunks[0].states[0]

    def get_state(self) -> Any:
        """The state after the element that was given last."""
        state = pickle.loads(self._prefetcher.state() if self._state is None else self._state)
        return {**state, "batches": pickle.loads(state["batches"])}

    def end(self) -> None:
        """End the threads, and let go of what they have read."""
        self._prefetcher.close()
        self._left.clear()

    def _received(self, staged: bool) -> Chunk:
        before = self._prefetcher.state()
        element = next(self._prefetcher)
        if isinstance(element, Chunk):
            return element
        assert self._owner is not None
        group = group_of(element, self._owner.mesh) if staged else Single(element)
        return Chunk(group, [before, self._prefetcher.state()])

    def _first(self, most: int) -> Chunk:
        chunk = self._left.popleft()
        if chunk.group.count > most:
            chunk, rest = chunk.split(most)
            self._left.appendleft(rest)
        self._given += chunk.group.count
        return chunk


class IteratorSource:
    """The elements of a pass, for one call of ``run_steps``.

    Args:
      reader: of the pass.
    """

    def __init__(self, reader: PassReader) -> None:
        self._reader = reader
        self._chunks: list[Chunk] = []

    def take(self, steps: int, staged: bool) -> tuple[list[ElementGroup | Single], Exception | None]:
        """See :class:`replicax.execution.many_steps.loop.StepSource`."""
        chunks, error = self._reader.take(steps, staged)
        self._chunks = joined_where_alike(chunks)
        return [chunk.group for chunk in self._chunks], error

    def give_back(self, groups: Sequence[ElementGroup | Single]) -> None:
        """See :class:`replicax.execution.many_steps.loop.StepSource`."""
        left = sum(group.count for group in groups)
        back: collections.deque[Chunk] = collections.deque()
        for chunk in reversed(self._chunks):
            if left <= 0:
                break
            if left < chunk.group.count:
                chunk = chunk.split(chunk.group.count - left)[1]
            left -= chunk.group.count
            back.appendleft(chunk)
        self._reader.give_back(back)
