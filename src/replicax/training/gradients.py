"""``value_and_grad``: differentiate with respect to variables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from replicax import _jax
from replicax.devices.host_values import check_numbers
from replicax.locality import M, R
from replicax.pytrees import is_leaf, registered
from replicax.training.pairs import differentiable
from replicax.training.step_hooks import gradient_hook
from replicax.user_functions import checked_function, checked_result
from replicax.variables import as_arrays
from replicax.variables.store import DerivedStore, current_store, use_store
from replicax.variables.variable import Variable

_Result = TypeVar("_Result")


def value_and_grad(
    fn: Callable[..., _Result],
    variables: Any,
    has_aux: bool = False,
    unconnected_gradients: Literal["zero", "none"] = "zero",
) -> Callable[..., tuple[_Result, Any]]:
    """A function that computes ``fn`` and its gradient with respect to ``variables``.

    Each replica differentiates its own loss. The gradients are not summed over the replicas: each
    replica has its own. Writes inside ``fn`` (for example the statistics of a batch normalisation) take effect.

    Args:
      fn: returns a scalar loss of a float dtype; with ``has_aux``, a pair of the loss and any pytree. It reads
        the variables directly, for example as a closure; they are not passed to it.
      variables: a list of variables, or any pytree of them, such as that of :func:`as_variables`. Other leaves
        (functions, numbers, integer variables that are not trainable) have the gradient ``None``.
      has_aux: whether ``fn`` returns a pair.
      unconnected_gradients: the gradient of a variable without influence on the loss: ``"zero"``, zeros;
        ``"none"``, ``None``, with which ``Optimizer.apply_gradients`` skips the variable.

    Returns:
      A function of the arguments of ``fn`` that returns ``(loss, gradients)``, or ``((loss, aux), gradients)``.
      If the pytree ``variables`` itself is among the arguments, ``fn`` gets it with arrays (:func:`as_arrays`), as
      functions of other libraries expect: ``value_and_grad(loss_fn, params)(params, batch)``.
      The gradients have the structure of ``variables``; each has the shape and dtype of its variable.

    Raises:
      TypeError: ``variables`` has leaves but no variable, a JAX array among them, or a variable whose dtype has no
        gradient; the loss is not a float scalar; ``has_aux`` is no bool.
      ValueError: a variable is listed twice; ``unconnected_gradients`` is neither.
      LocalityError: the loss is mirrored, usually because it ends in an all-reduce: each of the n replicas
        would differentiate all of it, and the sum of the gradients would be n times too large.

    No collective.

    >>> import replicax
    >>> x = replicax.Variable(3.0, name="x")
    >>> loss, (grad,) = replicax.value_and_grad(lambda: x * x, [x])()
    >>> float(loss), float(grad)
    (9.0, 6.0)
    >>> params = replicax.as_variables({"x": x, "power": 2})
    >>> loss, grads = replicax.value_and_grad(lambda params: params["x"] ** params["power"], params)(params)
    >>> grads["power"], float(grads["x"])
    (None, 6.0)
    """
    checked_function(fn, "value_and_grad(fn, variables)")
    if not isinstance(has_aux, bool | np.bool_):
        raise TypeError(
            f"value_and_grad(fn, variables): has_aux must be a bool, got {has_aux!r}; several variables go into a list"
        )
    if unconnected_gradients not in ("zero", "none"):
        raise ValueError(
            f"value_and_grad: unconnected_gradients must be 'zero' or 'none', got {unconnected_gradients!r}"
        )
    leaves, tree = jax.tree_util.tree_flatten(registered(variables), is_leaf=is_leaf)
    chosen = differentiable(leaves, "value_and_grad(fn, variables)")
    for v in chosen:
        if not jnp.issubdtype(v.dtype, jnp.inexact):
            raise TypeError(f"value_and_grad: {v.describe()} has no gradient; leave it out of variables")

    @_jax.public_call
    def with_gradient(*args: Any, **kwargs: Any) -> Any:
        outer, hook = current_store(), gradient_hook.get()
        written: dict[Variable, str | None] = {}
        aux_leaves: list[Any] = []
        aux_tree: Any = None
        connected: set[int] = set()

        def loss_of(values: list[Any]) -> tuple[Any, tuple[list[Any], list[Any]]]:
            nonlocal aux_leaves, aux_tree
            if unconnected_gradients == "none":
                values = [_noting(value, functools.partial(connected.add, i)) for i, value in enumerate(values)]
            store = DerivedStore(outer, dict(zip(chosen, values, strict=True)))
            with use_store(store if hook is None else hook.reading(store)):
                given, named = _with_arrays(variables, args, kwargs)
                loss, aux = _split(checked_result(fn(*given, **named), fn, "value_and_grad"), has_aux)
            if hook is not None:
                loss = hook.before(loss)
            written.update(store.written)
            # A differentiated function can return only arrays; a closure keeps the other objects of aux.
            aux_leaves, aux_tree = jax.tree_util.tree_flatten(registered(aux), is_leaf=is_leaf)
            arrays = [leaf for leaf in aux_leaves if isinstance(leaf, jax.Array)]
            return loss, ([store.values[v] for v in store.written], arrays)

        differentiated = jax.value_and_grad(loss_of, has_aux=True)
        with _jax.kept_programs():
            (loss, (values, arrays)), gradients = differentiated([outer.read(v) for v in chosen])
        _jax.renew_kept_programs()
        for (variable, error_unless_mirrored), value in zip(written.items(), values, strict=True):
            outer.write(variable, value, error_unless_mirrored)
        loss, *gradients = outer.expect([loss, *gradients], frozenset({M, R}), _MIRRORED_LOSS, is_loss=True)
        if hook is not None:
            loss, gradients = hook.after(loss, gradients)
        if unconnected_gradients == "none":
            gradients = [g if i in connected else None for i, g in enumerate(gradients)]
        by_variable = dict(zip(chosen, gradients, strict=True))
        gradients = jax.tree_util.tree_unflatten(
            tree, [by_variable.get(leaf) if isinstance(leaf, Variable) else None for leaf in leaves]
        )
        if not has_aux:
            return loss, gradients
        rest = iter(arrays)
        aux_leaves = [next(rest) if isinstance(leaf, jax.Array) else leaf for leaf in aux_leaves]
        return (loss, jax.tree_util.tree_unflatten(aux_tree, aux_leaves)), gradients

    return with_gradient


def _with_arrays(variables: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments, with arrays in place of the pytree ``variables`` itself; a single variable stays one."""

    def given(value: Any) -> Any:
        return as_arrays(value) if value is variables and not isinstance(value, Variable) else value

    return [given(value) for value in args], {name: given(value) for name, value in kwargs.items()}


def _noting(value: Any, note: Callable[[], Any]) -> Any:
    """Return ``value``, and call ``note`` when a gradient flows back to it.

    In reverse mode JAX keeps zeros symbolic, and makes arrays of them only at the end.
    """
    same = jax.custom_vjp(lambda x: x)

    def backward(_: None, gradient: Any) -> tuple[Any]:
        if isinstance(gradient, SymbolicZero):
            return (jnp.zeros(gradient.shape, gradient.dtype),)
        note()
        return (gradient,)

    same.defvjp(lambda x: (x.value, None), backward, symbolic_zeros=True)
    return same(value)


_MIRRORED_LOSS = (
    "value_and_grad: the loss is the same on every replica, usually because it ends in an all-reduce. Each replica "
    "would differentiate all of it, and the summed gradients would be counted once for every replica. Differentiate "
    "this replica's share (replicax.compute_average_loss), and reduce the loss afterwards, to show it."
)


def _split(returned: Any, has_aux: bool) -> tuple[Any, Any]:
    if has_aux:
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(f"value_and_grad(has_aux=True): fn must return a pair (loss, aux), got {returned!r}")
        loss, aux = returned
    else:
        loss, aux = returned, None
    if isinstance(loss, Variable):
        loss = loss.read_value()
    check_numbers(loss, "value_and_grad: the loss that fn returned")
    shape, dtype = jnp.shape(loss), jnp.result_type(loss)
    if shape != () or not jnp.issubdtype(dtype, jnp.floating):
        hint = "; replicax.compute_average_loss turns per-example losses into one" if shape else ""
        raise TypeError(f"value_and_grad: the loss must be a float scalar, got {dtype.name}{list(shape)}{hint}")
    return jnp.asarray(loss), aux
