"""Objects among the arguments of a step: what the step has read of them is part of its key.

A step sees such an object itself, and a number that it reads there is a constant of its program. If the number has
changed at the next call, that call needs another program. Comparing all attributes would not do: many change from step
to step without influence on the program, such as a count of steps. So while a step is traced, the classes of its
objects record which attributes are read, by any code. Functions and classes can't record that: everything that a
function captures counts as read, and all values in a class.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from replicax import _jax
from replicax.devices.host_values import is_key
from replicax.pytrees import Attribute, CapturedVariable, Definition, has_items, is_leaf, key_paths
from replicax.user_functions import asks_class, global_names


class ObjectKey(_jax.ById):
    """Equal to another of the same object, or of an equal one, while what a step has read of it is unchanged."""

    __slots__ = ("reads",)
    __hash__ = _jax.ById.__hash__

    def __init__(self, value: Any) -> None:
        # What the step has read of the object, and of those in it, when it was traced with it; by id and name.
        self.reads: dict[tuple[int, str], Attribute] = {}
        cls: Any = type(value)
        if cls.__hash__ not in (None, object.__hash__):
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
        shown = ", ".join(repr(a) for a in self.reads.values() if not (callable(a.now) or type(a) is Definition))
        return f"{super().__repr__()} with {shown}" if shown else super().__repr__()


def object_keys_in(key: Any) -> Iterator[ObjectKey]:
    """The keys of objects in a key that consists of tuples."""
    if isinstance(key, tuple):
        for part in key:
            yield from object_keys_in(part)
    elif isinstance(key, ObjectKey):
        yield key


def is_traced(value: Any) -> bool:
    """Whether a step computes this value while it is traced."""
    return isinstance(value, jax.core.Tracer)


@contextlib.contextmanager
def recording_reads(
    key: tuple[Any, ...],
    code: Any,
    module: dict[str, Any],
    captured: Sequence[CapturedVariable],
    is_of_step: Callable[[Any], bool] = is_traced,
    used: Callable[[], Collection[int]] = tuple,
) -> Iterator[set[int]]:
    """While a step is traced: let its ``key`` depend on what it reads of its objects, and doesn't change itself.

    Its ``code`` may read from the objects' classes, too. Functions read globals of ``module``, that of the step:
    libraries don't change under a program. If the step fails, no attribute that it has read, and no variable that it
    has ``captured``, keeps a traced value, or one that is lost (:meth:`EarlierValue.is_lost`). Yields the threads that
    run the step: this one, and those that are added.
    """
    keys = [*object_keys_in(key)]
    recording = _Recording(module, is_of_step)
    recording.add_captured(captured)
    try:
        _active.append(recording)
        with _noting():
            for of_object in keys:
                value = of_object.value
                recording.add((value, type(value)) if asks_class(code) else value, of_object)
                if has_items(value):
                    recording.note(value, "", of_object)
        yield recording.threads
    except BaseException:
        with _noting():
            for earlier in recording.earlier:
                if earlier.replaced(is_traced) or earlier.is_lost(used):
                    earlier.put_back()
        raise
    finally:
        recording.found.clear()
        with _noting(), _lock:
            _active[:] = [other for other in _active if other is not recording]
            if not _active:
                _undo.close()
        for of_object in keys:
            of_object.reads = {place: x for place, x in of_object.reads.items() if x.is_unchanged()}


class EarlierValue:
    """An attribute that a step has read of an object, or a variable that it captures, with the leaves that it had.

    Args:
      is_read: whether the step has surely read it, also if it is a number.
    """

    def __init__(self, variable: Attribute, is_of_step: Callable[[Any], bool], is_read: bool) -> None:
        self.variable, self._is_of_step, self._is_read = variable, is_of_step, is_read
        self._value = variable.now
        self.leaves, self._structure = _flattened(self._value)

    def replaced(self, is_of_step: Callable[[Any], bool]) -> list[tuple[Any, Any]]:
        """The leaves, by path, in whose places there are now other values, which are of the step."""
        leaves, structure = _flattened(self.variable.now)
        if not any(map(is_of_step, leaves)):
            return []
        now = {path: leaf for path, leaf in zip(key_paths(structure), leaves, strict=True) if is_of_step(leaf)}
        before = zip(key_paths(self._structure), self.leaves, strict=True)
        return [(path, x) for path, x in before if now.get(path, x) is not x]

    def is_lost(self, used: Callable[[], Collection[int]]) -> bool:
        """Whether the step, with the arrays of ``used`` ids, has used a leaf that it has then set to a computed one.

        A container may be read to set an item, so its numbers don't count. Random keys and the uint32 numbers of random
        streams never count: without harm to what is trained, a stream starts again.
        """
        for path, leaf in self.replaced(self._is_of_step):
            is_itself = self._is_read and not path
            if isinstance(leaf, jax.Array):
                counts = leaf.dtype != np.uint32 and not is_key(leaf.dtype) and not is_traced(leaf)
                # A traced step may have read its number, as by float(x), which leaves no operation.
                is_used = counts and ((is_itself and self._is_of_step is is_traced) or id(leaf) in used())
            elif isinstance(leaf, np.ndarray):
                is_used = self._is_read and leaf.dtype != np.uint32
            else:
                is_used = is_itself and isinstance(leaf, int | float | complex | np.generic)
            if is_used:
                return True
        return False

    def put_back(self) -> None:
        """Let it have the value again, and dicts and lists their items."""
        self.variable.set(self._value)
        _filled(self._value, self._structure.unflatten(self.leaves))


def _filled(container: Any, items: Any) -> Any:
    """``container`` with these items again, if it is a dict or list, as others may hold it too; otherwise ``items``."""
    if isinstance(container, dict) and isinstance(items, dict):
        for added in container.keys() - items.keys():
            del container[added]
        container.update({name: _filled(container.get(name), item) for name, item in items.items()})
        return container
    if isinstance(container, list) and isinstance(items, list):
        before = [*container, *[None] * len(items)]
        container[:] = [_filled(old, item) for old, item in zip(before, items, strict=False)]
        return container
    return items


def earlier_values() -> list[EarlierValue]:
    """What the step of this thread has read so far of its objects, but what it set first, and what it captures."""
    return [value for recording in _active if threading.get_ident() in recording.threads for value in recording.earlier]


def _flattened(value: Any) -> tuple[list[Any], Any]:
    with contextlib.suppress(Exception):  # JAX can't take it apart
        return jax.tree_util.tree_flatten(value, is_leaf=lambda x: x is None or is_leaf(x))
    return [], jax.tree_util.tree_structure(())


class _Recording:
    """Records what a step reads of its objects, while there are some in ``found``, by id, with containers."""

    def __init__(self, module: dict[str, Any], is_of_step: Callable[[Any], bool]) -> None:
        self._module = module
        self._is_of_step = is_of_step
        self.threads = {threading.get_ident()}
        self.earlier: list[EarlierValue] = []
        self.found: dict[int, tuple[Any, ObjectKey]] = {}
        self._captured: dict[int, tuple[Any, ObjectKey]] = {}
        self._set: set[tuple[int, str]] = set()  # by the step itself
        self._classes: set[type] = set()

    def add(self, value: Any, key: ObjectKey, is_captured: bool = False) -> None:
        """Record for ``key`` what is read of this object, or of those in this container, function or class.

        Among the values that a function has captured, only functions are searched further.
        """
        todo, recorded = [value], self._captured if is_captured else self.found
        while todo:
            value = todo.pop()
            cls: Any = type(value)
            if id(value) in recorded or not may_change(cls):
                continue
            recorded[id(value)] = value, key
            if isinstance(value, _jax.CONTAINERS):
                todo += value.values() if isinstance(value, dict) else value
            todo += (getattr(value, name) for name in _PARTS.get(cls, ()))
            if cls is types.FunctionType:
                self._note_captured(value, key)
            if is_captured or cls in _PARTS:
                continue
            if isinstance(value, type | types.FunctionType):
                self._note_all(value, key)
            elif cls not in self._classes:
                todo += self._specials(cls)
                try:
                    _replace(cls, "__getattribute__", _Recording._note_read)
                    _replace(cls, "__setattr__", lambda recording, value, name: recording._set.add((id(value), name)))
                    self._classes.add(cls)
                except TypeError:  # Python can't change its class: all attributes count
                    if cls.__dictoffset__:
                        self._note_read(value, "__dict__")

    def add_captured(self, variables: Sequence[CapturedVariable]) -> None:
        """Note what these variables, and attributes of objects in them, hold before the step."""
        todo: list[Attribute] = [*variables]
        for variable in todo:
            self.earlier.append(earlier := EarlierValue(variable, self._is_of_step, is_read=False))
            for leaf in earlier.leaves if isinstance(variable, CapturedVariable) else ():
                cls: Any = type(leaf)
                if may_change(cls) and not isinstance(leaf, type | types.FunctionType):
                    todo += [Attribute(leaf, name, False) for name in [*getattr(leaf, "__dict__", ())]]

    def _note_captured(self, fn: types.FunctionType, key: ObjectKey) -> None:
        places: list[tuple[Any, str]] = [*zip(fn.__closure__ or (), fn.__code__.co_freevars, strict=True)]
        if fn.__globals__ is self._module:
            names = [name for name in global_names(fn.__code__) if name in self._module]
            places += [(self._module, n) for n in names if not isinstance(self._module[n], types.ModuleType)]
        for owner, name in places:
            self.add(self.note(owner, name, key, CapturedVariable), key, is_captured=True)
        self.add(self.note(fn, "", key, Definition), key, is_captured=True)

    def _specials(self, cls: type) -> list[Any]:
        """The methods that Python calls without reading an attribute, such as operators."""
        found = {name: fn for owner in reversed(cls.__mro__) for name, fn in vars(owner).items() if name[:2] == "__"}
        own = {name for name, fn in found.items() if getattr(fn, "__globals__", None) is self._module}
        own = own - {"__init__", "__new__", "__del__"} | {"__call__"}
        called = [fn for name, fn in found.items() if name in own]
        return [cls, *called] if any(map(asks_class, called)) else called

    def _note_all(self, value: Any, key: ObjectKey) -> None:
        for owner in getattr(value, "__mro__", (value,)):
            for name, item in [*vars(owner).items()]:
                if not name.startswith("__") and not hasattr(type(item), "__get__"):
                    self.add(self.note(owner, name, key), key)

    def _note_read(self, value: Any, name: str) -> None:
        if name != "__class__":  # isinstance asks for that
            key = self.found[id(value)][1]
            now = self.note(value, "__dict__" if name == "__getstate__" else name, key)  # copies ask for the state
            self.add((now, type(value)) if asks_class(now) else now, key)

    def note(self, owner: Any, name: str, key: ObjectKey, cls: type[Attribute] = Attribute) -> Any:
        """Let ``key`` depend on this attribute; return its value if that is new."""
        place = id(owner), name
        if place in key.reads or place in self._set:
            return None
        attribute = key.reads[place] = cls(owner, name)
        now = attribute.now
        if cls is Attribute and name not in ("", "__dict__"):
            self.earlier.append(EarlierValue(attribute, self._is_of_step, is_read=True))
        return now


def _replace(cls: Any, name: str, note: Callable[[_Recording, Any, str], Any]) -> None:
    """Let a method of a class note, once for all that record: steps that overlap for long replace it only once."""

    def noted(value: Any, attribute: str, *new: Any) -> Any:
        if (thread := threading.get_ident()) not in _threads_that_note:
            for recording in [*_active]:
                if id(value) in recording.found and thread in recording.threads:
                    with _noting():
                        note(recording, value, attribute)
        return original(value, attribute, *new)

    with _lock:
        if (cls, name) in _replaced:
            return
        original, own = getattr(cls, name), vars(cls).get(name)
        type.__setattr__(cls, name, functools.wraps(original)(noted))
        _replaced.add((cls, name))
        _undo.callback(_replaced.discard, (cls, name))
        _undo.callback(*(type.__delattr__, cls, name) if own is None else (type.__setattr__, cls, name, own))


@contextlib.contextmanager
def _noting() -> Iterator[None]:
    """Stop noting reads in this thread: the garbage collector may run a ``__del__`` that reads an object."""
    _threads_that_note.add(threading.get_ident())
    try:
        yield
    finally:
        _threads_that_note.discard(threading.get_ident())


_PARTS: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    functools.cached_property: ("func",),
    property: ("fget",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
}
"""The attributes in which values of these classes hold functions and objects."""

_threads_that_note: set[int] = set()
_lock = threading.Lock()
_active: list[_Recording] = []
_replaced: set[tuple[type, str]] = set()
_undo = contextlib.ExitStack()
"""Closed when none is active any more: then the classes of the objects are as before."""


@functools.lru_cache(1024)
def may_change(cls: Any) -> bool:
    """Return whether values of this class have attributes or items that a step may read, and that may change."""
    fixed = (types.ModuleType, jax.Array, np.ndarray, np.generic)
    package = str(cls.__module__).partition(".")[0]
    return cls not in _jax.BY_VALUE and not issubclass(cls, fixed) and package not in ("jax", "jaxlib", "replicax")
