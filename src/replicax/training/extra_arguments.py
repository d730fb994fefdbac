"""Further arguments of a transformation: values and functions of the parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from replicax import _jax
from replicax.devices.host_values import as_array
from replicax.errors import TraceError
from replicax.locality import Locality, R, T
from replicax.pytrees import is_leaf, registered
from replicax.training.totals import all_reduced_sum
from replicax.variables import Variable
from replicax.variables.store import DerivedStore, Store, current_store, use_store

SHARES = frozenset({"value", "grad"})
"""Arguments of Optax that are each replica's share, like the gradients."""


def check_accepted(tx: Any, extra: Mapping[str, Any]) -> None:
    """Raise a TypeError that names those of these arguments that the transformation does not take."""
    if not extra:
        return
    parameters = inspect.signature(tx.update).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    unknown = [name for name in extra if name not in parameters]
    if unknown:
        raise TypeError(
            f"apply_gradients: the transformation takes no argument {', '.join(map(repr, unknown))}; its update takes "
            f"{', '.join(parameters)}. (optax.with_extra_args_support makes one that ignores unknown arguments.)"
        )


def arrays_in(
    extra: Mapping[str, Any],
) -> tuple[list[tuple[str, str, Any]], Callable[[Sequence[Any]], dict[str, Any]]]:
    """The arrays in arguments other than functions, and how to replace them.

    Returns for each array the argument's name, the path of the array, and the array; and a function from arrays to
    arguments.
    """
    plain = {name: value for name, value in extra.items() if not callable(value)}
    leaves, tree = jax.tree_util.tree_flatten_with_path(registered(plain), is_leaf=is_leaf)
    store = current_store()
    entries: list[tuple[str, str, Any]] = []
    values: list[Any] = []
    positions: list[int] = []
    for i, (path, leaf) in enumerate(leaves):
        name = path[0].key
        value = store.read(leaf) if isinstance(leaf, Variable) else leaf
        if name in SHARES:
            value = as_array(value, f"apply_gradients: {name}{jax.tree_util.keystr(path[1:])}")
        values.append(value)
        if isinstance(value, jax.Array):
            positions.append(i)
            entries.append((name, f"{name}{jax.tree_util.keystr(path[1:])}", value))

    def put_back(arrays: Sequence[Any]) -> dict[str, Any]:
        for i, array in zip(positions, arrays, strict=True):
            values[i] = array
        return {**extra, **jax.tree_util.tree_unflatten(tree, values)}

    return entries, put_back


def refused_of(name: str, where: str, aggregate: bool) -> tuple[frozenset[Locality], str]:
    """The localities that are not allowed for an array of an argument, and the text of the error."""
    return frozenset() if aggregate and name in SHARES else frozenset({T}), (
        f"apply_gradients: {where} differs between replicas, which would then change the variables in different ways: "
        "reduce it first (replicax.get_replica_context().all_reduce)"
    )


def of_parameters(
    fn: Callable[..., Any], name: str, variables: Sequence[Variable], tree: Any, aggregate: bool
) -> Callable[..., Any]:
    """The argument ``name``, ``fn(parameters, …)``, for a transformation that calls it with parameters of its choice.

    Line searches do. While it runs, the variables (none for models of other libraries) have these values, so that it
    may read them, if the parameters are in their tree: others may be only some of them, or flattened. With
    ``aggregate`` it returns a replica's share; the caller gets the sum, and the sum's gradient.
    """
    refused = frozenset({R}) if aggregate else frozenset({R, T})
    if aggregate:
        problem = "has been all-reduced: return this replica's share; the shares are summed, and so are their gradients"
    else:
        problem = (
            "differs between replicas, or has been all-reduced, so its gradient would be wrong: pass "
            "aggregate=True, and return this replica's share"
        )

    def own(parameters: Sequence[Any], structure: Any, outer: Store, args: Sequence[Any], kwargs: Any) -> Any:
        present = zip(variables, parameters, strict=False) if structure == tree else ()
        store = DerivedStore(outer, dict(present))
        with use_store(store):
            result = fn(jax.tree_util.tree_unflatten(structure, parameters), *args, **kwargs)
        if store.written:
            raise TraceError(
                f"apply_gradients: {name} assigns {next(iter(store.written)).describe()}, but the transformation may "
                "call it any number of times, with trial parameters. Assign outside of it."
            )
        leaves, shape = jax.tree_util.tree_flatten(result)
        text = f"the result of {name} (an argument of the optimizer) {problem}"
        leaves = [
            outer.expect([as_array(leaf, f"apply_gradients: result of {name}")], refused, text)[0] for leaf in leaves
        ]
        return jax.tree_util.tree_unflatten(shape, leaves)

    total: Callable[[Any], Any] = all_reduced_sum if aggregate else lambda values: values

    def called(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        outer = current_store()
        given, structure = jax.tree_util.tree_flatten(parameters)

        # All replicas have the same parameters, so the gradient of the sum is the sum of the gradients.
        @jax.custom_vjp
        def summed(leaves: Sequence[Any]) -> Any:
            return total(own(leaves, structure, outer, args, kwargs))

        def forward(leaves: Sequence[Any]) -> tuple[Any, Any]:
            result, pull = jax.vjp(lambda leaves: own(leaves, structure, outer, args, kwargs), leaves)
            return total(result), pull

        summed.defvjp(forward, lambda pull, cotangent: (total(pull(cotangent)[0]),))
        with _jax.kept_programs():
            result = summed(given)
        _jax.renew_kept_programs()
        return result

    return called
