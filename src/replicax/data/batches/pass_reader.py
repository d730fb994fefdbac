"""Reads a pass for an iterator: single elements, or groups of them for ``run_steps``."""

from __future__ import annotations

import collections
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from replicax.data.batches.groups import BatchGroup, joined_groups
from replicax.data.batches.prefetch import Prefetcher
from replicax.execution.many_steps.element_groups import Single, group_of
from replicax.execution.many_steps.loop import Taken

if TYPE_CHECKING:
    from replicax.data.batches.global_batches import GlobalBatches
    from replicax.workers.replicas import Replicas


class PassReader:
    """Reads one pass.

    Args:
      elements: the elements of the pass.
      ahead: the number of elements, or groups of them, that wait on the devices.
      owner: the replicas that the elements are for.
    """

    def __init__(self, elements: GlobalBatches, ahead: int, owner: Replicas | None) -> None:
        self._elements = elements
        self._prefetcher = Prefetcher(elements, ahead)
        self._owner = owner
        # Batches that were read as a group and are not all used yet; those of the last call of `take`; and the state
        # after the last used one.
        self._left: collections.deque[BatchGroup] = collections.deque()
        self._taken: list[BatchGroup] = []
        self._state: bytes | None = None
        self._given = 0  # elements

    def next(self) -> Any:
        """The next element."""
        if not self._left:
            element = next(self._prefetcher)
            if not isinstance(element, BatchGroup):
                self._state = None
                self._given += 1
                return element
            self._left.append(element)
        return self._first(1).batches.elements()[0]

    def take(self, steps: int, staged: bool, on_wait: Callable[[], None] | None = None) -> Taken:
        """The next elements.

        Args:
          steps: the number of elements; returns fewer at the end.
          staged: whether to read groups of this size from now on, so that the next calls find them in one group.
          on_wait: called now and then while it waits; may raise a BaseException that is no Exception.

        Raises:
          StopIteration, Exception: as :meth:`next`, if there is no element before the error.
          BaseException: an interrupt, or what ``on_wait`` raised; all the elements then come next again.
        """
        if staged:
            self._elements.grouping = steps, self._given
        self._taken = []
        before, failure = self._given, None
        try:
            while (missing := steps - (self._given - before)) > 0:
                if not self._left:
                    self._left.append(self._receive_group(staged, on_wait))
                self._taken.append(self._first(missing))
        except Exception as error:
            if not self._taken:
                raise
            failure = None if isinstance(error, StopIteration) else error
        except BaseException:
            self._give_back(self._given - before)
            raise
        self._taken = joined_groups(self._taken)
        return Taken([group.batches for group in self._taken], failure, self._give_back)

    def _give_back(self, count: int) -> None:
        """Let the last ``count`` elements of the last :meth:`take` come next again."""
        self._given -= count
        while count > 0:
            group = self._taken.pop()
            if group.batches.count > count:
                group = group.split(group.batches.count - count)[1]
            count -= group.batches.count
            self._left.appendleft(group)
            self._state = group.states[0]

    def get_state(self) -> Any:
        """The state after the last returned element."""
        state = pickle.loads(self._prefetcher.state() if self._state is None else self._state)
        return {**state, "batches": pickle.loads(state["batches"])}

    def end(self) -> None:
        """End the threads, and free what they have read."""
        self._prefetcher.close()
        self._left.clear()

    def _receive_group(self, staged: bool, on_wait: Callable[[], None] | None) -> BatchGroup:
        before = self._prefetcher.state()
        element = self._prefetcher.next(on_wait)
        if isinstance(element, BatchGroup):
            return element
        assert self._owner is not None
        group = group_of(element, self._owner.mesh) if staged else Single(element)
        return BatchGroup(group, [before, self._prefetcher.state()])

    def _first(self, most: int) -> BatchGroup:
        group = self._left.popleft()
        if group.batches.count > most:
            group, rest = group.split(most)
            self._left.appendleft(rest)
        self._given += group.batches.count
        self._state = group.states[-1]
        return group
