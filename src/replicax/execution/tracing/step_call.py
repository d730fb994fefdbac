"""The call of a step's Python, and checks of what it returns and of the objects that it was given."""

from __future__ import annotations

import io
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from replicax import _jax
from replicax.devices.host_values import is_key
from replicax.execution.tracing.object_attributes import earlier_values
from replicax.execution.tracing.stateful_arguments import bound_arguments, opened, stays_whole
from replicax.pytrees import is_leaf, registered
from replicax.user_functions import checked_result, has_not_run
from replicax.variables.variable import Variable


def call_step(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    values: Mapping[Variable, Any],
) -> Any:
    """``fn(*args, **kwargs)``, as one replica's step, which reads and writes the ``values`` of variables while it runs.

    ``args`` and ``kwargs`` are used in no other call. Raises a TypeError if an argument is a dataset or an iterator; if
    the step is async or a generator, so that none of it has run; if its result can't leave a step; or if it has changed
    an argument in place that it does not return.
    """
    with opened(fn, args, kwargs) as (call, own_args, own_kwargs):
        objects = mutable_objects(fn, call, own_args, own_kwargs)
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
    check_changes_leave(objects, {id(x) for x in [*leaves, *values.values()]})
    return returned


_OF_DATASETS = ("element_spec", "to_iter_dataset")
"""Names that classes of datasets have: those of Replicax and tf.data, and of Grain."""


def mutable_objects(fn: Any, call: Any, args: Any, kwargs: Any) -> list[tuple[str, Any, list[Any]]]:
    """Arguments of ``call``, a copy of the step ``fn``, that are objects with arrays: the place and leaves of each.

    Raises a TypeError if one is a dataset or an iterator: the step would take elements once, while it is traced.
    """
    objects = []
    builtin = (dict, list, tuple, types.NoneType)
    arguments = {"args": args, "kwargs": kwargs, "functools.partial": None if call is fn else bound_arguments(call)}
    flat = jax.tree_util.tree_flatten_with_path(arguments, is_leaf=lambda x: not isinstance(x, builtin))[0]
    for path, value in flat:
        where = path[0].key + jax.tree_util.keystr(path[1:])
        is_pytree = not jax.tree_util.all_leaves([value])
        if not is_pytree and _has_batches(type(value)):
            raise TypeError(
                f"{where} is a {type(value).__name__}, but a step takes one batch, not a dataset or an iterator: "
                "for batch in strategy.distribute_dataset(dataset): strategy.run(step, args=(batch,)). "
                "strategy.run_steps(step, iterator, steps) takes the batches of an iterator itself"
            )
        if is_pytree and not stays_whole(value):
            objects.append((where, value, jax.tree_util.tree_leaves(value, is_leaf=stays_whole)))
    return objects


def _has_batches(kind: type) -> bool:
    """Return whether this is a class of datasets or iterators; files, which give lines, are for callbacks."""
    is_dataset = issubclass(kind, Iterable) and any(hasattr(kind, name) for name in _OF_DATASETS)
    return is_dataset or (issubclass(kind, Iterator) and not issubclass(kind, io.IOBase))


def check_changes_leave(objects: list[tuple[str, Any, list[Any]]], leaving: set[int]) -> None:
    """Raise if the step has given one of ``objects`` new values, none of which leaves it.

    Random keys and uint32 numbers, which random streams consist of, don't count: a stream that has counted on is lost
    without harm to what is trained.
    """
    for where, value, before in objects:
        old = set(map(id, before))
        leaves = jax.tree_util.tree_flatten_with_path(value, is_leaf=stays_whole)[0]
        changed = [(path, leaf) for path, leaf in leaves if id(leaf) not in old and _counts(leaf)]
        if changed and not any(id(leaf) in leaving for _, leaf in changed):
            raise TypeError(
                f"{where}, of type {type(value).__name__}, was changed in place by the step "
                f"({where}{jax.tree_util.keystr(changed[0][0])}), and nothing of that leaves it: a step works on a "
                "copy of its arguments, as under jax.jit, so the change would be lost. Return the changed object, and "
                f"pass it to the next step; {_KEEP} If only this step needs the change, change a copy "
                "(nnx.merge(graphdef, state, copy=True))"
            )


def check_attributes_stay(used: Callable[[], Collection[int]]) -> None:
    """Raise if a step of this thread has used an array, of an object or captured, and then set it to a computed one.

    Later calls would not run this Python, and take the old value as a constant. ``used`` returns the ids of the arrays
    with which the step has computed.
    """
    for earlier in earlier_values():
        if earlier.is_lost(used):
            raise TypeError(
                f"{earlier.variable.label} was read by the step, which then set it: the Python of a step runs once, so "
                f"later calls would read the old value again. Pass the value as an argument, and return the new one; "
                f"{_KEEP}"
            )


_KEEP = (
    "or keep what changes in replicax.Variables (replicax.as_variables, replicax.value_and_grad, replicax.Optimizer), "
    "or with Flax NNX in an nnx.Module."
)


def _counts(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return leaf.dtype != np.uint32 and not is_key(leaf.dtype)
    return isinstance(leaf, int | float | complex)
