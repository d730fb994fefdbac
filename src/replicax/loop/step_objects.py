"""The objects of a step: what ``train(checkpoints="folder")`` saves, by the names that the step's code gives them."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from replicax.checkpoint import Checkpoint
from replicax.checkpoint.leaves import has_variables
from replicax.errors import LIBRARIES
from replicax.execution.tracing.function_key import Wrapper
from replicax.execution.tracing.stateful_arguments import holds_state
from replicax.pytrees import is_leaf, register
from replicax.training import Optimizer
from replicax.user_functions import default_arguments
from replicax.variables import Variable

DEPTH = 4
"""How far functions and objects of the user are followed from the step."""


def objects_of(step: Callable[..., Any]) -> dict[str, Any]:
    """The variables, optimizers, metrics, models and pytrees of variables that a step uses, by name.

    Closures, globals, default arguments, arguments of a ``functools.partial`` and attributes of objects are looked at,
    also those of the functions that the step calls.

    >>> import replicax
    >>> w = replicax.Variable(0.0, name="w")
    >>> def loss():
    ...     return w.value**2
    >>> def step():
    ...     w.assign(loss())
    >>> list(objects_of(step))
    ['w']
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    saved: set[int] = set()
    todo = [("step", step, 0)]
    while todo:
        name, value, depth = todo.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_saved(value):
            leaves = set(map(id, _leaves(value)))
            if not leaves <= saved:
                found[_free(name, found)] = value
                saved |= leaves
        elif depth < DEPTH:
            todo += [(part, inner, depth + 1) for part, inner in _parts_of(value)]
    return found


def is_saved(value: Any) -> bool:
    """Return whether ``value`` holds state of a run: a variable, optimizer, metric or model, or a pytree of these."""
    if isinstance(value, Variable | Optimizer) or _has_some_variables(value) or holds_state(value):
        return True
    if isinstance(value, types.ModuleType | type | types.FunctionType | str) or value is None:
        return False
    return any(leaf is not value and is_saved(leaf) for leaf in _leaves(value))


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function uses, or what an object of the user's has, by name."""
    if isinstance(value, functools.partial):
        yield "step", value.func
        yield from ((f"argument_{i}", argument) for i, argument in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, Wrapper):
        yield from vars(value).items()
    elif isinstance(value, types.MethodType):
        yield "step", value.__func__
        yield "self", value.__self__
    elif isinstance(value, types.FunctionType):
        is_typed = value.__code__.co_filename.startswith("<")  # into a prompt or a document
        if is_typed or (value.__module__ or "").split(".")[0] not in LIBRARIES:
            yield from _used_by(value)
    elif not isinstance(value, types.ModuleType | type):
        if callable(value):
            yield "step", type(value).__call__
        fields = getattr(value, "__dict__", None)
        if type(value).__module__.split(".")[0] not in LIBRARIES and isinstance(fields, dict):
            yield from fields.items()
    # Of functions, and of what jax.jit and jax.custom_vjp make; last, as the step's own names come first.
    if callable(value) and not isinstance(value, type) and (wrapped := getattr(value, "__wrapped__", None)) is not None:
        yield "step", wrapped


def _used_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # nothing has been assigned to it yet
            continue
    yield from default_arguments(function)
    codes = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)


def _free(name: str, taken: Mapping[str, Any]) -> str:
    """``name``, changed if a checkpoint can't have an object of that name."""
    name = name.strip("_") or "object"
    if hasattr(Checkpoint, name) or name == "train":
        name += "_"
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


def _has_some_variables(value: Any) -> bool:
    return has_variables(value) and not isinstance(value, type) and len(value.variables) > 0


def _leaves(tree: Any) -> Iterator[Any]:
    for leaf in jax.tree_util.tree_leaves(tree, is_leaf=is_whole):
        if register(leaf):  # a container that JAX did not know
            yield from _leaves(leaf)
        else:
            yield leaf


def is_whole(value: Any) -> bool:
    """Return whether ``value`` is an object with variables of its own, or an iterator, and no container of leaves."""
    return is_leaf(value) or isinstance(value, Optimizer | Iterator) or _has_some_variables(value) or holds_state(value)
