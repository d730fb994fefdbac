"""Reads a pass for an iterator: single elements, or groups of them for ``run_steps``."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from replicax.data.batches.prefetch import Prefetcher
from replicax.execution.many_steps.element_groups import ElementGroup, Single, group_of, joined
from replicax.execution.many_steps.loop import Taken

if TYPE_CHECKING:
    from replicax.data.batches.global_batches import GlobalBatches
    from replicax.workers.replicas import Replicas


class PassReader:
    """Reads one pass of elements for the replicas ``owner``, ``ahead`` elements, or groups of them, in advance."""

    def __init__(self, elements: GlobalBatches, ahead: int, owner: Replicas | None) -> None:
        self._elements = elements
        self._prefetcher = Prefetcher(elements, ahead)
        self._owner = owner
        # Elements that were read as a group and are not all used yet; and the state after the last used one.
        self._left: collections.deque[ElementGroup | Single] = collections.deque()
        self._state: bytes | None = None
        self._given = 0  # elements

    def next(self) -> Any:
        """The next element."""
        if not self._left:
            element = next(self._prefetcher)
            if not isinstance(element, ElementGroup | Single):
                self._state = None
                self._given += 1
                return element
            self._left.append(element)
        return self._first(1).elements()[0]

    def take(self, steps: int, grouped: bool, on_wait: Callable[[], None] | None = None) -> Taken:
        """The next ``steps`` elements; fewer at the end.

        If they are ``grouped``, it reads groups of this size from now on, so that the next calls find them in one. It
        calls ``on_wait`` now and then while it waits; that may raise a BaseException that is no Exception.

        Raises:
          StopIteration, Exception: as :meth:`next`, if there is no element before the error.
          BaseException: an interrupt, or what ``on_wait`` raised; all the elements then come next again.
        """
        if grouped:
            self._elements.grouping = steps, self._given
        groups: list[ElementGroup | Single] = []
        before, failure = self._given, None
        try:
            while (missing := steps - (self._given - before)) > 0:
                if not self._left:
                    self._left.append(self._receive_group(grouped, on_wait))
                groups.append(self._first(missing))
        except Exception as error:
            if not groups:
                raise
            failure = None if isinstance(error, StopIteration) else error
        except BaseException:  # perhaps between two lines of _first: so the groups are counted
            self._give_back(groups, sum(group.count for group in groups))
            raise
        if len(groups) > 1:
            # As few as possible: each that can't be joined gets a key of its own.
            keys = [g.join_key if isinstance(g, ElementGroup) else number for number, g in enumerate(groups)]
            pairs = itertools.groupby(zip(keys, groups, strict=True), lambda pair: pair[0])
            groups = [joined([group for _, group in alike]) for _, alike in pairs]
        return Taken(groups, failure, functools.partial(self._give_back, list(groups)))

    def _give_back(self, taken: list[ElementGroup | Single], count: int) -> None:
        """Let the last ``count`` elements of those that were taken come next again."""
        self._given -= count
        while count > 0:
            group = taken.pop()
            if isinstance(group, ElementGroup) and group.count > count:
                group = group.split(group.count - count)[1]
            count -= group.count
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

    def _receive_group(self, grouped: bool, on_wait: Callable[[], None] | None) -> ElementGroup | Single:
        before = self._prefetcher.state()
        element = self._prefetcher.next(on_wait)
        if isinstance(element, ElementGroup | Single):
            return element
        assert self._owner is not None
        group = group_of(element, self._owner.mesh) if grouped else Single(element)
        return dataclasses.replace(group, states=[before, self._prefetcher.state()])

    def _first(self, most: int) -> ElementGroup | Single:
        group = self._left.popleft()
        if isinstance(group, ElementGroup) and group.count > most:
            group, rest = group.split(most)
            self._left.appendleft(rest)
        self._given += group.count
        self._state = group.states[-1]
        return group
