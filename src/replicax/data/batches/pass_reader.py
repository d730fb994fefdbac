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
        group = self._first(1)
        try:
            return group.elements()[0]
        except BaseException:
            self._give_back([group], 1)
            raise

    def take(self, steps: int, grouped: bool, on_wait: Callable[[], None] | None = None) -> Taken:
        """The next ``steps`` elements; fewer at the end.

        If they are ``grouped``, it reads groups of this size from now on, so that the next calls find them in one. It
        calls ``on_wait`` now and then while it waits; that may raise a BaseException that is no Exception.

        Raises:
          StopIteration, Exception: as :meth:`next`, if there is no element before the error.
          BaseException: an interrupt, what ``on_wait`` raised, or no memory to join elements; all then come next again.
        """
        if grouped:
            self._elements.grouping = steps, self._given
        groups: list[ElementGroup | Single] = []
        received: list[ElementGroup | Single] = []
        given, state, left, failure = self._given, self._state, list(self._left), None
        try:
            try:
                while (missing := steps - (self._given - given)) > 0:
                    if not self._left:
                        received.append(self._receive(on_wait))
                        self._left.append(received[-1])
                        if grouped:
                            self._left[0] = self._as_group(received[-1])
                    groups.append(self._first(missing))
            except Exception as error:
                if not groups:
                    raise
                failure = None if isinstance(error, StopIteration) else error
            if len(groups) > 1:
                # As few as possible: each that can't be joined gets a key of its own.
                keys = [g.join_key if isinstance(g, ElementGroup) else number for number, g in enumerate(groups)]
                pairs = itertools.groupby(zip(keys, groups, strict=True), lambda pair: pair[0])
                groups = [joined([group for _, group in alike]) for _, alike in pairs]
        except BaseException:  # perhaps between two lines of _first
            if received and state is None:
                state = received[0].states[0]
            self._given, self._state, self._left = given, state, collections.deque([*left, *received])
            raise
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

    def _receive(self, on_wait: Callable[[], None] | None) -> ElementGroup | Single:
        before = self._prefetcher.state()
        element = self._prefetcher.next(on_wait)
        if isinstance(element, ElementGroup | Single):
            return element
        return Single(element, states=[before, self._prefetcher.state()])

    def _as_group(self, element: ElementGroup | Single) -> ElementGroup | Single:
        if isinstance(element, ElementGroup):
            return element
        assert self._owner is not None
        return dataclasses.replace(group_of(element.element, self._owner.mesh), states=element.states)

    def _first(self, most: int) -> ElementGroup | Single:
        rest: list[ElementGroup] = []
        group = self._left[0]
        if isinstance(group, ElementGroup) and group.count > most:
            group, *rest = group.split(most)
        self._left.popleft()
        self._left.extendleft(rest)
        self._given += group.count
        self._state = group.states[-1]
        return group
