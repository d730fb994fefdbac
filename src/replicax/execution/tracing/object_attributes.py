"""Objects among the arguments of a step: what the step has read of them is part of its key.

A step sees such an object itself, and a number that it reads there is a constant of its program. If the number is
another at the next call, that is another program. All attributes can't be compared: many change from step to step and
mean nothing to the program, such as a count of steps. So while a step is traced, the classes of its objects record
which attributes are read, whatever code reads them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from replicax import _jax
from replicax.pytrees import Attribute, has_items


class ObjectKey(_jax.ById):
    """Equal to another of the same object, or of an equal one, while what a step has read of it is unchanged.

    Attributes:
      reads: what the step has read of the object, and of those in it, when it was traced with it; by id and name.
    """

    __slots__ = ("reads",)
    __hash__ = _jax.ById.__hash__

    def __init__(self, value: Any) -> None:
        self.reads: dict[tuple[int, str], Attribute] = {}
        kind: Any = type(value)
        if kind.__hash__ not in (None, object.__hash__):
            try:
                self._hash, self._ref, self._strong = hash(value), None, value
                return
            except TypeError:  # something in it has no hash
                pass
        super().__init__(value)

    def __eq__(self, other: object) -> bool:
        if type(other) is not ObjectKey or self._hash != other._hash:
            return False
        one = self._strong if self._ref is None else self._ref()
        two = other._strong if other._ref is None else other._ref()
        if one is None or not (one is two or one == two):
            return False
        for reads in (self.reads, other.reads):
            for attribute in reads.values():
                if not attribute.is_unchanged():
                    return False
        return True

    def __repr__(self) -> str:
        shown = ", ".join(repr(a) for a in self.reads.values() if not callable(a.now))
        return f"{self.value!r} with {shown}" if shown else repr(self.value)


def object_keys_in(key: Any) -> Iterator[ObjectKey]:
    """The keys of objects in a key that consists of tuples."""
    if isinstance(key, tuple):
        for part in key:
            yield from object_keys_in(part)
    elif isinstance(key, ObjectKey):
        yield key


@contextlib.contextmanager
def recording_reads(key: tuple[Any, ...]) -> Iterator[None]:
    """While a step is traced: let its ``key`` depend on what it reads of its objects, and doesn't change itself."""
    keys = [*object_keys_in(key)]
    recording = _Recording()
    try:
        _active.append(recording)
        with _noting():
            for of_object in keys:
                recording.add(of_object.value, of_object)
                if has_items(of_object.value):
                    of_object.reads[id(of_object.value), ""] = Attribute(of_object.value, "")
        yield
    finally:
        recording.found.clear()
        with _noting(), _lock:
            _active[:] = [other for other in _active if other is not recording]
            if not _active:
                _undo.close()
        for of_object in keys:
            of_object.reads = {place: x for place, x in of_object.reads.items() if x.is_unchanged()}


class _Recording:
    """What a step reads of its objects, as long as some are ``found``: objects and containers, by id."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.found: dict[int, tuple[Any, ObjectKey]] = {}
        self._set: set[tuple[int, str]] = set()  # by the step itself
        self._kinds: set[type] = set()

    def add(self, value: Any, key: ObjectKey) -> None:
        """Record for ``key`` what is read of this object, or of those in this container."""
        todo = [value]
        while todo:
            value = todo.pop()
            kind: Any = type(value)
            if id(value) in self.found or not may_change(kind):
                continue
            self.found[id(value)] = value, key
            if isinstance(value, _jax.CONTAINERS):
                todo += value.values() if isinstance(value, dict) else value
            if kind not in self._kinds:
                try:
                    self._replace(kind, "__getattribute__", self._note_read)
                    self._replace(kind, "__setattr__", lambda value, name: self._set.add((id(value), name)))
                    self._kinds.add(kind)
                except TypeError:  # Python can't change its class: all attributes count
                    if kind.__dictoffset__:
                        self._note_read(value, "__dict__")

    def _replace(self, kind: Any, name: str, note: Callable[[Any, str], Any]) -> None:
        def noted(value: Any, attribute: str, *new: Any) -> Any:
            if id(value) in self.found and threading.get_ident() == self._thread not in _threads_that_note:
                with _noting():
                    note(value, attribute)
            return original(value, attribute, *new)

        with _lock:
            original, own = getattr(kind, name), vars(kind).get(name)
            type.__setattr__(kind, name, functools.wraps(original)(noted))
            _undo.callback(*(type.__delattr__, kind, name) if own is None else (type.__setattr__, kind, name, own))

    def _note_read(self, value: Any, name: str) -> None:
        name = "__dict__" if name == "__getstate__" else name  # copies ask for the state
        key, place = self.found[id(value)][1], (id(value), name)
        if place not in key.reads and place not in self._set and name != "__class__":  # isinstance asks for that
            attribute = key.reads[place] = Attribute(value, name)
            self.add(attribute.now, key)


@contextlib.contextmanager
def _noting() -> Iterator[None]:
    """Note nothing more in this thread: the garbage collector may run a ``__del__`` that reads an object."""
    _threads_that_note.add(threading.get_ident())
    try:
        yield
    finally:
        _threads_that_note.discard(threading.get_ident())


_threads_that_note: set[int] = set()
_lock = threading.Lock()
_active: list[_Recording] = []
_undo = contextlib.ExitStack()
"""Closed when none is active any more: then the classes of the objects are as before."""


@functools.lru_cache(1024)
def may_change(kind: Any) -> bool:
    """Whether values of this class have attributes or items that a step may read, and that may be others later."""
    functions = (types.FunctionType, types.MethodType, functools.partial)
    fixed = (type, types.ModuleType, *functions, jax.Array, np.ndarray, np.generic)
    package = str(kind.__module__).partition(".")[0]
    return kind not in _jax.BY_VALUE and not issubclass(kind, fixed) and package not in ("jax", "jaxlib", "replicax")
