"""The call of a step's Python, and what must hold of what it gives back and of the objects that it was given."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax import _jax
from replicax.execution.tracing.stateful_arguments import opened
from replicax.pytrees import is_leaf, registered
from replicax.user_functions import checked_result, has_not_run
from replicax.variables.variable import Variable


def call_step(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    values: Mapping[Variable, Any],
    written: Iterable[Variable],
) -> Any:
    """``fn(*args, **kwargs)``, as one replica's step.

    Args:
      fn: the step.
      args: put together for this call alone.
      kwargs: the same, by name.
      values: of the variables that the step reads and writes; filled while it runs.
      written: those that it writes.

    Raises:
      TypeError: nothing of it has run, as it is async or a generator; it returns something that can't leave a step; or
        it has changed an argument in place, of which nothing leaves.
    """
    objects = _objects((args, kwargs))
    with opened(fn, args, kwargs) as (call, own_args, own_kwargs):
        returned = checked_result(call(*own_args, **own_kwargs), fn, "strategy.run")
    for leaf in jax.tree_util.tree_leaves(returned, is_leaf=lambda x: is_leaf(x) or has_not_run(x)):
        checked_result(leaf, fn, "strategy.run")
    leaves = jax.tree_util.tree_leaves(registered(returned), is_leaf=is_leaf)
    for leaf in leaves:
        if _jax.is_mutable(leaf):
            raise TypeError(
                "a step returned a mutable array (jax.new_ref), which can't leave it: return its value, ref[...], or "
                "keep the state in a replicax.Variable"
            )
    if objects and not any(v.trainable for v in written):
        _check_changes_leave(objects, {id(x) for x in [*leaves, *values.values()]})
    return returned


def _objects(arguments: Any) -> list[tuple[str, Any, list[Any]]]:
    """The objects among the arguments that have arrays in them, such as modules: where each is, and its leaves."""
    found = []
    builtin = (dict, list, tuple, types.NoneType)
    flat = jax.tree_util.tree_flatten_with_path(arguments, is_leaf=lambda x: not isinstance(x, builtin))[0]
    for path, value in flat:
        if not is_leaf(value) and not jax.tree_util.all_leaves([value]):
            where = ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])
            found.append((where, value, jax.tree_util.tree_leaves(value, is_leaf=is_leaf)))
    return found


def _check_changes_leave(objects: list[tuple[str, Any, list[Any]]], leaving: set[int]) -> None:
    """Raise if the step has given objects among its arguments new arrays, none of which leaves it.

    Whole numbers and keys don't count: a random stream that has counted on is lost without harm to what is trained.
    """
    changed = []
    for where, value, before in objects:
        old = set(map(id, before))
        for path, leaf in jax.tree_util.tree_flatten_with_path(value, is_leaf=is_leaf)[0]:
            if id(leaf) in old or not isinstance(leaf, jax.Array) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
                continue
            if id(leaf) in leaving:
                return
            changed.append((where + jax.tree_util.keystr(path), where, type(value).__name__))
    if changed:
        first, where, kind = changed[0]
        raise TypeError(
            f"{where}, of type {kind}, was changed in place by the step ({first}), and nothing of that leaves it: a "
            "step works on a copy of its arguments, as under jax.jit, so nothing would be trained. Keep the parameters "
            "in replicax.Variables (replicax.as_variables, replicax.value_and_grad, replicax.Optimizer), or return the "
            "changed object, and pass it to the next step"
        )
