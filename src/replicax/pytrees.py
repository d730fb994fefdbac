"""Pytrees: which containers there are, which leaves stay whole, and whether a container or an object has changed.

To JAX, subclasses of dict, list and tuple are leaves unless they are registered: their items would be neither traced
nor taken apart. So Replicax registers each when it first meets it. (JAX knows namedtuples, ``OrderedDict`` and
``defaultdict``. Other classes, such as dataclasses, must be registered by their authors:
``jax.tree_util.register_dataclass``.)
"""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import functools
import operator
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from replicax import _jax

Tree = TypeVar("Tree")

_CHANGEABLE = (list, dict, set)
_BUFFERS = (collections.deque, bytearray, array.array)
_MOST_ITEMS = 100
_lock = threading.Lock()


class Opaque:
    """Base of the objects that stay whole when Replicax flattens a pytree, though JAX may look into them."""

    __slots__ = ()


is_leaf: Callable[[Any], bool] = functools.partial(type.__instancecheck__, Opaque)
"""Whether Replicax treats a value as a leaf where ``jax.tree`` would go on (variables): asked of all nodes, so in C."""


def are_equal(a: Any, b: Any) -> bool:
    """Whether two leaves that JAX did not make are equal, as NaNs are; ``False`` if they can't be compared."""
    kinds = [(type(x), getattr(x, "dtype", None), getattr(x, "shape", None)) for x in (a, b)]
    try:
        return kinds[0] == kinds[1] and bool(np.all((a == b) | ((a != a) & (b != b))))
    except Exception:
        return False


def registered(tree: Tree) -> Tree:
    """``tree``, after registering the containers in it that JAX does not know."""
    while sum(map(register, jax.tree_util.tree_leaves(tree, is_leaf=is_leaf))):
        pass  # what is inside comes next
    return tree


def register(leaf: Any) -> bool:
    """Register the type of ``leaf`` with JAX if it is a container; returns whether it is."""
    kind = type(leaf)
    if not isinstance(leaf, (dict, list, tuple)):  # part of each call
        return False
    with _lock:
        if jax.tree_util.all_leaves([leaf]):  # no other thread has been faster
            _register(kind)
    return True


def key_paths(tree: Any) -> list[tuple[Any, ...]]:
    """The path of each leaf of a structure: the keys by which ``jax.tree_util`` finds it in a value.

    To ask a class for its keys takes a value of it. Its parts are ``object()``, as where JAX needs such a value. A
    class that computes with its parts, or looks at their shapes, can't have these: they are numbered.
    """
    data, children = tree.node_data(), tree.children()
    if data is None:
        return [()]
    keys: list[tuple[Any, ...]] = []
    with contextlib.suppress(Exception):
        node = tree.from_node_data_and_children(jax.tree_util.default_registry, data, [_LEAF] * len(children))
        value = node.unflatten([object() for _ in children])
        keys = [path for path, _ in jax.tree_util.tree_flatten_with_path(value)[0]]
    if len(keys) != len(children):
        keys = [(jax.tree_util.FlattenedIndexKey(i),) for i in range(len(children))]
    return [(*key, *path) for key, child in zip(keys, children, strict=True) for path in key_paths(child)]


_LEAF: Any = jax.tree_util.tree_structure(0)


class Contents:
    """The present content of a container of Python; shows a later change by one comparison of identities an item."""

    __slots__ = ("container", "items", "keys")

    def __init__(self, container: Any) -> None:
        self.container = container
        self.keys = tuple(container) if isinstance(container, dict) else None
        self.items = list(container if self.keys is None else container.values())

    @classmethod
    def of_all_in(cls, value: Any) -> tuple[Contents, ...]:
        """Return the contents of ``value`` and of the containers in it that can change, also in frozen dataclasses."""
        found: list[Contents] = []
        seen: set[int] = set()
        todo = [value]
        while todo:
            value = todo.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if type(value) in _jax.CONTAINERS or has_items(value):
                contents = cls(value)
                todo += contents.items
                found += () if isinstance(value, (tuple, frozenset)) else (contents,)
            elif _jax.is_record(value):
                todo += (getattr(value, field.name) for field in dataclasses.fields(value))
        return tuple(found)


def has_items(value: Any) -> bool:
    """Whether ``value`` is a container of Python that can change, and whose items count: in long buffers they don't."""
    return isinstance(value, _CHANGEABLE) or (isinstance(value, _BUFFERS) and len(value) <= _MOST_ITEMS)


def are_unchanged(contents: Iterable[Contents]) -> bool:
    """Whether each container has the very items that it had.

    Part of every call of a step that captures containers, so it is one function.
    """
    for seen in contents:
        container = seen.container
        if len(container) != len(seen.items):
            return False
        if seen.keys is not None and tuple(container) != seen.keys:
            return False
        if not all(map(operator.is_, container if seen.keys is None else container.values(), seen.items)):
            return False
    return True


class Attribute:
    """An attribute of an object, as it is now, or missing: by it a later change is seen.

    Numbers and containers of up to 100 items count by value, other objects by identity. The name ``"__dict__"`` stands
    for all attributes that are not in slots, ``""`` for the object itself, with its items.
    """

    __slots__ = ("_contents", "_key", "_name", "_owner", "_value")

    def __init__(self, owner: Any, name: str, is_watched: bool = True) -> None:
        self._owner = _jax.ById(owner)
        self._name = name
        if not is_watched:  # and only asked for its present value
            return
        now = self.now
        self._value = _jax.ById(now)
        contents = Contents.of_all_in(now)
        is_long = sum(len(c.items) for c in contents) > _MOST_ITEMS
        self._contents = () if is_long else contents
        self._key = None if is_long else IdentityKeys().of(now)

    @property
    def now(self) -> Any:
        """Return what is kept in the object now, or in its class, or :class:`Missing`; runs no code of the user's."""
        owner = self._owner._strong if self._owner._ref is None else self._owner._ref()
        try:
            attributes = object.__getattribute__(owner, "__dict__")
        except AttributeError:
            attributes = {}
        if self._name in attributes:
            return attributes[self._name]
        if self._name == "__dict__":
            return attributes
        if not self._name:
            return owner
        found = next((vars(kind)[self._name] for kind in type(owner).__mro__ if self._name in vars(kind)), Missing)
        if not isinstance(found, types.MemberDescriptorType):
            return found
        try:
            return found.__get__(owner)  # one of __slots__
        except AttributeError:
            return Missing

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"{type(self._owner.value).__name__}.{self._name}"

    def set(self, value: Any) -> None:
        """Let the owner have another value, or lose it if that is :class:`Missing`."""
        if value is Missing:
            object.__delattr__(self._owner.value, self._name)
        else:
            object.__setattr__(self._owner.value, self._name, value)

    def is_unchanged(self) -> bool:
        """Whether it has the same value, or an equal one."""
        now, seen = self.now, self._value
        is_same = (seen._strong if seen._ref is None else seen._ref()) is now and not (now is None and seen._ref)
        if is_same and (not self._contents or are_unchanged(self._contents)):
            return True
        return bool(IdentityKeys().of(now) == self._key)

    def __repr__(self) -> str:
        return f"{self._name}={self._value!r}"


class CapturedVariable(Attribute):
    """A variable that a function captures: the owner is the globals of a module, or the cell of a closure."""

    __slots__ = ()

    @property
    def now(self) -> Any:
        owner = self._owner._strong  # neither can be referred to weakly
        if type(owner) is dict:
            return owner.get(self._name, Missing)
        try:
            return owner.cell_contents
        except ValueError:  # not assigned yet
            return Missing

    @property
    def label(self) -> str:
        return repr(self._name)

    def set(self, value: Any) -> None:
        is_global = type(owner := self._owner._strong) is dict
        if value is not Missing:
            owner.update({self._name: value}) if is_global else setattr(owner, "cell_contents", value)
        elif is_global:
            del owner[self._name]
        else:
            del owner.cell_contents


class Definition(Attribute):
    """The code of a function and its defaults, which editors exchange when they reload it."""

    __slots__ = ()

    @property
    def now(self) -> Any:
        fn = self._owner.value
        return Missing if fn is None else (fn.__code__, fn.__defaults__, fn.__kwdefaults__)

    def is_unchanged(self) -> bool:
        fn, (code, defaults, keywords) = self._owner._ref(), self._value._strong
        if (
            fn is None
            or fn.__code__ is not code
            or fn.__defaults__ is not defaults
            or fn.__kwdefaults__ is not keywords
        ):
            return super().is_unchanged()
        return not self._contents or are_unchanged(self._contents)


class Missing:
    """Stands for an attribute that is not there."""


class IdentityKeys(_jax.Keys):
    """Keys in which other objects count by identity, and subclasses of list, dict and set also by their items."""

    def __init__(self) -> None:
        super().__init__()
        self._entered: set[int] = set()

    def of_other(self, value: Any) -> Any:
        """The key of any other value: the object itself."""
        if not has_items(value) or id(value) in self._entered:
            return _jax.ById(value)
        self._entered.add(id(value))
        base: Any = next((base for base in _CHANGEABLE if isinstance(value, base)), list)
        return _jax.ById(value), self.of(base(value))


def check_no_traced_fields(leaf: Any) -> None:
    """Raise a TypeError if a leaf is a dataclass or a function with traced values: they would escape from the step."""
    if isinstance(leaf, types.FunctionType | functools.partial):
        for name, value in _held_by(leaf):
            if any(isinstance(x, jax.core.Tracer) for x in jax.tree_util.tree_leaves(value, is_leaf=is_leaf)):
                raise TypeError(
                    f"a step returned the function {getattr(leaf, '__name__', repr(leaf))!r}, which captures {name!r}, "
                    "a value that the step computes and that ends with it: return the value, and make the function "
                    "outside"
                )
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        for field in dataclasses.fields(leaf):
            leaves = jax.tree_util.tree_leaves(getattr(leaf, field.name, None), is_leaf=is_leaf)
            if any(isinstance(x, jax.core.Tracer) for x in leaves):
                raise TypeError(
                    f"a step returned a {type(leaf).__name__}, whose field {field.name!r} holds values that the step "
                    "computes, but JAX does not know the class: decorate it with jax.tree_util.register_dataclass"
                )


def _held_by(fn: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function captures, by name, and what the functions that it captures capture."""
    seen: set[int] = set()
    todo = [fn]
    while todo:
        fn = todo.pop()
        if id(fn) in seen:
            continue
        seen.add(id(fn))
        held: list[tuple[str, Any]]
        if isinstance(fn, functools.partial):
            held = [("func", fn.func), *((f"args[{i}]", x) for i, x in enumerate(fn.args)), *fn.keywords.items()]
        else:
            cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
            held = [(name, cell.cell_contents) for name, cell in cells if cell != types.CellType()]
            held += [("a default", x) for x in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())]
        yield from held
        todo += [x for _, x in held if isinstance(x, types.FunctionType | functools.partial)]


def _names_of_items(container: Any) -> tuple[str, ...] | None:
    """Return the names of a dict's items that are attributes, too; ``None`` if its items are all its attributes."""
    attributes = vars(container) if type(container).__dictoffset__ else {}
    if attributes is container:
        return None
    return tuple(name for name, value in attributes.items() if dict.get(container, name, _NO_ITEM) is value)


_NO_ITEM = object()


def _register(kind: Any) -> None:
    """Register a container; it is rebuilt without its ``__init__``, whose arguments are not known."""
    if issubclass(kind, dict):
        in_order, has_factory = (issubclass(kind, t) for t in (collections.OrderedDict, collections.defaultdict))

        def keys_of(d: Any) -> tuple[Any, ...]:
            try:
                return tuple(d) if in_order else tuple(sorted(d))
            except TypeError:  # keys that have no order
                return tuple(d)

        def flatten_dict(d: Any) -> tuple[list[Any], Any]:
            keys = keys_of(d)
            factory = d.default_factory if has_factory else None
            return [(jax.tree_util.DictKey(k), d[k]) for k in keys], (keys, factory, _names_of_items(d))

        def rebuild_dict(aux: Any, children: Any) -> Any:
            new = kind.__new__(kind)
            keys, factory, names = aux
            if has_factory:
                new.default_factory = factory
            for key, child in zip(keys, children, strict=True):
                (collections.OrderedDict if in_order else dict).__setitem__(new, key, child)
            if names is None:
                object.__setattr__(new, "__dict__", new)
            for name in names or ():
                vars(new)[name] = dict.__getitem__(new, name)
            return new

        jax.tree_util.register_pytree_with_keys(kind, flatten_dict, rebuild_dict)
        return

    def flatten_sequence(items: Any) -> tuple[list[Any], Any]:
        return [(jax.tree_util.SequenceKey(i), x) for i, x in enumerate(items)], None

    def rebuild_sequence(_: Any, children: Any) -> Any:
        if issubclass(kind, tuple):
            return tuple.__new__(kind, children)
        new = kind.__new__(kind)
        list.extend(new, children)
        return new

    jax.tree_util.register_pytree_with_keys(kind, flatten_sequence, rebuild_sequence)
