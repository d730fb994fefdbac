"""Nests: subclasses of dict, list and tuple are containers, too.

To JAX they are leaves, unless somebody registers them: what is inside would be neither traced nor taken apart. So
Replicax registers them when it first meets them. (Namedtuples, ``OrderedDict`` and ``defaultdict`` JAX knows; other
classes, such as dataclasses, must be registered by whoever writes them: ``jax.tree_util.register_dataclass``.)
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax

Tree = TypeVar("Tree")

_lock = threading.Lock()


class Opaque:
    """Base of the objects that stay whole when Replicax flattens a pytree, though JAX may look into them."""

    __slots__ = ()


is_leaf: Callable[[Any], bool] = functools.partial(type.__instancecheck__, Opaque)
"""Whether Replicax treats a value as a leaf where ``jax.tree`` would go on (variables): asked of all nodes, so in C."""


def are_equal(a: Any, b: Any) -> bool:
    """Whether two leaves that are no arrays are equal, as far as they say so."""
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:
        return False


def known(tree: Tree) -> Tree:
    """``tree``, after making sure that JAX knows its containers.

    >>> import jax
    >>> from replicax.nests import known
    >>> class Batch(dict):
    ...     pass
    >>> jax.tree.map(lambda x: x + 1, known(Batch(x=1, y=[2])))
    {'x': 2, 'y': [3]}
    """
    while sum(map(learn, jax.tree_util.tree_leaves(tree, is_leaf=is_leaf))):
        pass  # what is inside comes next
    return tree


def learn(leaf: Any) -> bool:
    """Register the type of ``leaf``, if it is a container that JAX does not know; whether it was one."""
    kind = type(leaf)
    if not isinstance(leaf, dict | list | tuple):
        return False
    with _lock:
        if jax.tree_util.all_leaves([leaf]):  # nobody else has been faster
            _register(kind)
    return True


def check_no_traced_fields(leaf: Any) -> None:
    """Raise if ``leaf``, which JAX takes for a leaf, is a dataclass with traced values.

    Raises:
      TypeError: it is; they would escape from the step.
    """
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        for field in dataclasses.fields(leaf):
            if any(isinstance(x, jax.core.Tracer) for x in _leaves_of(leaf, field.name)):
                raise TypeError(
                    f"a step returned a {type(leaf).__name__}, whose field {field.name!r} holds values that the step "
                    "computes, but JAX does not know the class: decorate it with jax.tree_util.register_dataclass"
                )


def _leaves_of(leaf: Any, field: str) -> list[Any]:
    return jax.tree_util.tree_leaves(getattr(leaf, field, None), is_leaf=is_leaf)


def _register(kind: Any) -> None:
    """Objects are put together again without their ``__init__``, whose arguments nobody knows."""
    if issubclass(kind, dict):
        in_order = issubclass(kind, collections.OrderedDict)

        def keys_of(d: Any) -> tuple[Any, ...]:
            try:
                return tuple(d) if in_order else tuple(sorted(d))
            except TypeError:  # keys that have no order
                return tuple(d)

        def flatten_dict(d: Any) -> tuple[list[Any], Any]:
            keys = keys_of(d)
            return [(jax.tree_util.DictKey(k), d[k]) for k in keys], (keys, getattr(d, "default_factory", None))

        def rebuild_dict(aux: Any, children: Any) -> Any:
            new = kind.__new__(kind)
            keys, factory = aux
            if isinstance(new, collections.defaultdict):
                new.default_factory = factory
            for key, child in zip(keys, children, strict=True):
                (collections.OrderedDict if in_order else dict).__setitem__(new, key, child)
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
