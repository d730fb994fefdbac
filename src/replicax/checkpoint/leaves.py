"""Leaves: the parts of objects that a checkpoint saves, each under a name.

Pytrees are traversed down to variables, arrays and plain values. JAX does not treat optimizers, metrics and iterators
as pytrees; this module finds their leaves. A name is the path of a leaf, as in ``model/layers/0/w``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import numbers
import os
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.argument_checks import check_unmasked
from replicax.checkpoint.array_leaves import (
    ArrayLeaf,
    CopiesLeaf,
    DeviceArrayLeaf,
    HostArrayLeaf,
    VariableLeaf,
    keeps_each_copy,
)
from replicax.checkpoint.storage.index import OptimizerEntry, PlainEntry
from replicax.data import DistributedDataset, DistributedIterator
from replicax.errors import shortened
from replicax.pytrees import is_leaf, registered
from replicax.strategy import Strategy
from replicax.training import Optimizer
from replicax.values import PerReplica
from replicax.variables import Variable
from replicax.workers.lockstep import Lockstep

_SAVED = (
    "Saved are variables, optimizers, metrics, iterators of distributed datasets, arrays of JAX and NumPy, random "
    "keys, numbers, strings, bools and None, and pytrees of these"
)


@dataclasses.dataclass(frozen=True)
class IteratorLeaf:
    """An iterator of a distributed dataset."""

    iterator: DistributedIterator

    @property
    def lockstep(self) -> Lockstep:
        """The lockstep of the workers that read the dataset."""
        return self.iterator._pipeline.workers.lockstep

    def state(self, name: str) -> Any:
        """Return the leaf's place, as plain data, or raise a ValueError that says why it can't be saved."""
        try:
            return json.loads(json.dumps(self.iterator.get_state(), allow_nan=False))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name}: {error}") from error


@dataclasses.dataclass(frozen=True)
class OptimizerLeaf:
    """An optimizer; its slots are separate leaves."""

    optimizer: Optimizer

    def entry(self, names: Mapping[int, str]) -> OptimizerEntry:
        """The saved entry, with the names of variables by their ids."""
        if not self.optimizer.variables and self.optimizer.parameters is None:
            return OptimizerEntry(False, None)
        try:
            return OptimizerEntry(True, _names_in(self.optimizer.parameters, names))
        except KeyError:
            return OptimizerEntry(True, None)


Leaf = ArrayLeaf | PlainEntry | IteratorLeaf | OptimizerLeaf


class Leaves:
    """The leaves of some objects, without the functions in their pytrees.

    Raises:
      TypeError: an object can't be saved, or consists of functions; names it.
      ValueError: two leaves have one name, or JAX can't flatten an object.
    """

    def __init__(self, objects: Mapping[str, Any], workers: int = 1) -> None:
        self.by_name: dict[str, Leaf] = {}
        self._values: dict[str, Any] = {}
        self._workers = workers
        self._trees: dict[str, tuple[Any, list[str]]] = {}
        self._inside: dict[str, list[int]] = {}
        self._places: list[tuple[Variable, Any]] = []
        for name, tree in objects.items():
            if isinstance(tree, Iterator) and not isinstance(tree, DistributedIterator):
                raise _refusal(name, tree)
            try:
                paths, structure = jax.tree_util.tree_flatten_with_path(registered(tree), is_leaf=_stays_whole)
            except ValueError as error:
                raise ValueError(
                    f"Checkpoint: JAX can't flatten {name}, where the keys of a dict must be of one type, such as "
                    f"strings: {error}"
                ) from error
            names = ["/".join([name, *map(_word, path)]) for path, _ in paths]
            self._trees[name] = structure, names
            functions = [value for path, value in paths if path and _is_function(value)]
            if len(functions) == len(paths) > 0:
                raise _refusal(names[0], functions[0])
            for full, (path, value) in zip(names, paths, strict=True):
                if path and _is_function(value):
                    self._values[full] = value
                else:
                    self._add(full, value)

    def are_still(self, objects: Mapping[str, Any]) -> bool:
        """Return whether these are the leaves of ``objects``, except for plain values and arrays, which it updates.

        Finding all leaves again takes longer than copying them if they are many and small.
        """
        fresh: dict[str, Any] = {}
        for name, tree in objects.items():
            structure, names = self._trees[name]
            leaves, now = jax.tree_util.tree_flatten(registered(tree), is_leaf=_stays_whole)
            if now != structure:
                return False
            old = [self._values[full] for full in names]
            fresh |= {full: value for full, value, was in zip(names, leaves, old, strict=True) if value is not was}
        if any(variable.layout is not layout for variable, layout in self._places):
            return False
        if any(self._below(self._values[name]) != below for name, below in self._inside.items()):
            return False
        for name, value in fresh.items():
            before = self.by_name.get(name)
            if not isinstance(before, PlainEntry | DeviceArrayLeaf | HostArrayLeaf):
                return False
            leaf = self._leaf(name, value)
            if not _same_layout(leaf, before):
                return False
            self._values[name], self.by_name[name] = value, leaf
        return True

    def variables(self) -> Iterator[tuple[str, Variable]]:
        """The variables, including slots, with their names."""
        for name, leaf in self.by_name.items():
            if isinstance(leaf, VariableLeaf | CopiesLeaf):
                yield name, leaf.variable

    @functools.cached_property
    def names_of_variables(self) -> dict[int, str]:
        """The names of variables, by their ids."""
        return {id(variable): name for name, variable in self.variables()}

    def of(self, *kinds: type[Any]) -> dict[str, Any]:
        """The leaves of some classes, by name."""
        return {name: leaf for name, leaf in self.by_name.items() if isinstance(leaf, kinds)}

    def arrays(self) -> dict[str, ArrayLeaf]:
        """The leaves that are arrays, by name."""
        return self.of(ArrayLeaf)

    def rebuilt(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The objects, with other values for some leaves."""
        return {
            name: jax.tree_util.tree_unflatten(structure, [values.get(leaf, self._values[leaf]) for leaf in names])
            for name, (structure, names) in self._trees.items()
        }

    def _add(self, name: str, value: Any) -> None:
        self._values[name] = value
        if isinstance(value, Optimizer):
            self._put_leaf(name, OptimizerLeaf(value))
        elif not has_variables(value):
            self._put_leaf(name, self._leaf(name, value))
            return
        self._inside[name] = self._below(value)
        tree = value.state if isinstance(value, Optimizer) else value.variables
        for path, variable in jax.tree_util.tree_flatten_with_path(registered(tree), is_leaf=is_leaf)[0]:
            self._put_leaf("/".join([name, *map(_word, path)]), self._leaf(name, variable))

    def _below(self, value: Any) -> list[int]:
        """The ids of the variables inside an optimizer or a metric."""
        if isinstance(value, Optimizer):
            return [id(value.state)]
        return [id(v) for v in jax.tree_util.tree_leaves(registered(value.variables), is_leaf=is_leaf)]

    def _put_leaf(self, name: str, leaf: Leaf) -> None:
        if name in self.by_name:
            raise ValueError(f"Checkpoint: two objects are called {name!r}: rename a key of one of them")
        self.by_name[name] = leaf

    def _leaf(self, name: str, value: Any) -> Leaf:
        if isinstance(value, Variable):
            self._places.append((value, value.layout))
            is_copied = value.is_stacked or keeps_each_copy(value)
            return CopiesLeaf(value) if is_copied else VariableLeaf(value, self._workers)
        check_unmasked(value, f"Checkpoint: {name}")
        if isinstance(value, np.ndarray | np.generic) and _has_numbers(value):  # float64 is a float, too
            return HostArrayLeaf(value, self._workers)
        if value is None or isinstance(value, bool | int | float | complex | str):
            return PlainEntry(str(value) if isinstance(value, np.str_) else value)
        if isinstance(value, DistributedIterator):
            return IteratorLeaf(value)
        if isinstance(value, jax.core.Tracer):
            raise TypeError(f"Checkpoint: {name} is a value that a step computes: save outside of steps")
        if isinstance(value, jax.Array):
            return DeviceArrayLeaf(value, self._workers)
        raise _refusal(name, value)


def _same_layout(leaf: Any, before: Any) -> bool:
    """Return whether an array has the same kind and layout as before; or both are plain values."""
    if type(leaf) is not type(before):
        return False
    if isinstance(leaf, PlainEntry):
        return True
    return leaf.kind == before.kind and leaf.kind.is_weak == before.kind.is_weak and leaf.parts() == before.parts()


def has_variables(value: Any) -> bool:
    """Return whether ``value`` is a metric, or another object that lists its variables, all of them Replicax's."""
    listed = _listed_in(value)
    return listed is not None and all(isinstance(v, Variable) for _, v in listed)


def _listed_in(value: Any) -> list[tuple[Any, Any]] | None:
    """What an object lists as its variables, with paths; ``None`` if it is none that does."""
    if isinstance(value, Variable):
        return None
    try:
        variables = getattr(value, "variables", None)
    except Exception:  # a property that has no value now: Flax Linen's modules have variables only inside of apply
        return None
    if not isinstance(variables, Mapping):
        return None
    return jax.tree_util.tree_leaves_with_path(registered(variables), is_leaf=is_leaf)


def _is_function(value: Any) -> bool:
    """Return whether ``value`` is a function without state, such as an activation among the leaves of a module."""
    if isinstance(value, functools.partial):
        bound = jax.tree_util.tree_leaves((value.args, value.keywords), is_leaf=is_leaf)
        return _is_function(value.func) and all(isinstance(leaf, bool | int | float | str) for leaf in bound)
    if not callable(value) or isinstance(value, types.MethodType):
        return False
    return type(value).__module__.partition(".")[0] in ("builtins", "jax", "jaxlib", "numpy")


def _stays_whole(value: Any) -> bool:
    return value is None or is_leaf(value)


def _has_numbers(value: np.ndarray[Any, Any] | np.generic) -> bool:
    return value.dtype == np.bool_ or (jnp.issubdtype(value.dtype, jnp.number) and value.dtype.char not in "gG")


def _refusal(name: str, value: Any) -> TypeError:
    return TypeError(f"Checkpoint: {name} is {_description(value)}. {_SAVED}{_hint(value)}.")


def without_name(value: Any) -> TypeError:
    """The error that ``value`` was given to a checkpoint without a name."""
    if isinstance(value, str | os.PathLike):
        instead = "; the path is for its method: checkpoint.save(path)"
    elif isinstance(value, dict) and value and all(isinstance(key, str) and key.isidentifier() for key in value):
        instead = "; of a dict: Checkpoint(**objects)"
    else:
        instead = _hint(value)
    return TypeError(
        "Checkpoint takes objects by name, as in Checkpoint(model=model, optimizer=optimizer). The first without a "
        f"name is {_description(value)}. {_SAVED}{instead}."
    )


def _description(value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic):
        return f"a NumPy array of dtype {value.dtype}"
    shown = repr(value)
    return f"of the class {type(value).__module__}.{type(value).__qualname__}: {shortened(shown, 100)}"


def _hint(value: Any) -> str:
    listed = _listed_in(value) or []
    others = [(path, other) for path, other in listed if not isinstance(other, Variable)]
    if others and len(others) < len(listed):
        path, other = others[0]
        where = "variables" + jax.tree_util.keystr(path)
        return f"; of an object all variables have to be Replicax's, but its {where} is {_description(other)}"
    if isinstance(value, Strategy):
        return "; of a strategy save the variables that were made in its scope, each model or variable by a name"
    if isinstance(value, DistributedDataset):
        return "; of a dataset save the iterator, iter(dataset), which knows how far it has come"
    if isinstance(value, PerReplica):
        return "; for a value of each replica make a Variable with synchronization='on_read'"
    if isinstance(value, Iterator):
        return "; an iterator has to be one of strategy.distribute_dataset(…)"
    if isinstance(value, numbers.Number | bytes):
        return "; make it one of these"
    if callable(value):
        return "; leave functions out, and of an Optax transformation save its state, or make a replicax.Optimizer"
    return ""


def _word(key: Any) -> str:
    """A key of a path as part of a name, in which ``/`` divides."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute)).replace("\\", "\\\\").replace("/", "\\/")
    return str(key)


# --- the pytrees that optimizers were built for ---------------------------------------------------------


def _names_in(tree: Any, names: Mapping[int, str]) -> Any:
    """A pytree of variables as JSON: lists with a tag.

    Raises a KeyError for a container that is not one of Python's own, or a variable without a name.
    """
    if isinstance(tree, Variable):
        return names[id(tree)]
    if tree is None:
        return None
    if type(tree) is dict and all(type(key) is str for key in tree):
        return ["dict", {key: _names_in(value, names) for key, value in tree.items()}]
    if type(tree) in (list, tuple):
        return [type(tree).__name__, [_names_in(value, names) for value in tree]]
    raise KeyError(type(tree))


def tree_of_names(data: Any) -> Any:
    """The pytree for ``_names_in``'s data, with the names of variables as leaves."""
    if data is None or isinstance(data, str):
        return data
    kind, content = data
    if kind == "dict":
        return {key: tree_of_names(value) for key, value in content.items()}
    items = map(tree_of_names, content)
    return tuple(items) if kind == "tuple" else list(items)


def names_by_place(data: Any) -> dict[str, str]:
    """The names in ``_names_in``'s data by their places, such as ``[0]['w']``."""
    pairs = jax.tree_util.tree_flatten_with_path(tree_of_names(data))[0]
    return {jax.tree_util.keystr(path): name for path, name in pairs}
