"""The arrays of variables, as they are stored on the devices.

A program that updates many variables takes their arrays in one list and returns the new ones in another. A loop
over all variables before and after each call would take a good part of the time of a small step. So variables that
were written together share the list that the program returned, and the next call passes that list.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from replicax.variables.lost_arrays import FREED


class View(Protocol):
    """An object of another library that holds the array of a variable as its own."""

    def show(self) -> None:
        """Give it the present array."""


class SlotGroup:
    """Slots that share one list of arrays."""

    __slots__ = ("arrays", "slots", "views")

    def __init__(self, arrays: list[Any]) -> None:
        self.slots: tuple[Slot, ...] = ()  # the slots of the arrays, in order; empty if a slot has left the group
        self.arrays = arrays  # the present arrays; a call that writes all of them replaces the list
        self.views: tuple[weakref.ref[View], ...] = ()  # weak references to the views of the slots

    def show(self) -> None:
        """Show the present arrays in the views.

        To be called before an interrupt can come in between, as the arrays that the views have may be donated.
        """
        for reference in self.views:
            view = reference()
            if view is not None:
                view.show()


class Slot:
    """The array of one variable.

    Compiled programs hold slots, not variables: an unused variable frees its array, even while a cached program
    still holds its slot.
    """

    __slots__ = ("__weakref__", "_place", "caches", "view")

    def __init__(self, array: jax.Array) -> None:
        self._place = SlotGroup([array]), 0
        self.caches: weakref.WeakSet[Any] = weakref.WeakSet()
        """Caches of programs that use the variable; they drop these programs when it is gone."""
        self.view: weakref.ref[View] | None = None

    @property
    def array(self) -> Any:
        """The present array, or a :class:`~replicax.variables.lost_arrays.LostArray`."""
        group, index = self._place
        return group.arrays[index]

    @array.setter
    def array(self, array: Any) -> None:
        group, index = self._place
        group.arrays[index] = array

    def release(self) -> None:
        """Free the array; the variable is gone."""
        self._move(SlotGroup([FREED]), 0)
        escaped.discard(self)
        for cache in list(self.caches):
            cache.forget(self)

    def _move(self, group: SlotGroup, index: int) -> None:
        old = self._place
        self._place = group, index
        old[0].slots = ()
        old[0].arrays[old[1]] = None


def arrays_of(slots: Sequence[Slot]) -> list[Any]:
    """The present arrays of variables, in half the time that their properties take."""
    return [group.arrays[index] for group, index in [slot._place for slot in slots]]


def coalesced(slots: tuple[Slot, ...]) -> SlotGroup:
    """The group of exactly these slots, in this order; made now if there is none."""
    group = slots[0]._place[0] if slots else SlotGroup([])
    if group.slots is slots or group.slots == slots:
        return group
    group = SlotGroup(arrays_of(slots))
    for index, slot in enumerate(slots):
        slot._move(group, index)
    group.slots = slots
    group.views = tuple(slot.view for slot in slots if slot.view is not None)
    return group


def store_all(arrays: Mapping[Slot, jax.Array]) -> None:
    """Give variables new arrays: all of them, or none if an interrupt comes in between."""
    with launching:
        group = coalesced(tuple(arrays))
        group.arrays = list(arrays.values())
        escaped.difference_update(arrays)
        group.show()


def store_each(arrays: Mapping[Slot, Any]) -> None:
    """Give variables new arrays one after the other, from code outside a program; they stay in their groups."""
    with exchanging():
        for slot, array in arrays.items():
            slot.array = array
        escaped.difference_update(arrays)


def exchanging() -> contextlib.AbstractContextManager[Any]:
    """Hold :data:`launching` while code outside a program reads or changes an array.

    On a thread of XLA the lock is not taken: a host callback runs there, and its program may hold the lock.
    """
    is_callback = isinstance(threading.current_thread(), threading._DummyThread)
    return contextlib.nullcontext() if is_callback else launching


launching = threading.RLock()
"""Held while a program takes the arrays of its variables and stores new ones: two threads must not interleave."""

escaped: set[Slot] = set()
"""Slots whose array the user's code has: it must not be donated to a compiled program."""
