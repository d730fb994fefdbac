"""Pairs of gradients and variables, and the variables of a pytree that have gradients."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax.devices.host_values import check_numbers
from replicax.errors import shortened
from replicax.indexed_slices import is_slices
from replicax.variables import Variable


def pairs_of(grads_and_vars: Any) -> list[tuple[Any, Variable]]:
    """The pairs in ``grads_and_vars``, with gradients that may be ``None``; a TypeError for anything else."""
    what = "apply_gradients"
    if isinstance(grads_and_vars, Variable | jax.Array) or not isinstance(grads_and_vars, Iterable):
        raise TypeError(f"{what}: expected pairs, such as zip(gradients, variables), got {grads_and_vars!r}")
    pairs = []
    for i, pair in enumerate(grads_and_vars):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(
                f"{what}: entry {i} must be a pair (gradient, variable), got {pair!r}: pass zip(gradients, variables)"
            )
        gradient, variable = pair
        if not isinstance(variable, Variable):
            if isinstance(gradient, Variable):
                raise TypeError(
                    f"{what}: entry {i} has {gradient.describe()} first and {variable!r} second, the wrong way round: "
                    "the gradient comes first"
                )
            raise TypeError(f"{what}: the second part of entry {i} must be a variable, got {variable!r}")
        if gradient is not None and not is_slices(gradient):
            check_numbers(gradient, f"{what}: the gradient of {variable.describe()}")
        pairs.append((gradient, variable))
    return pairs


def _description_of(leaf: Any) -> str:
    """Describe a leaf that should be a variable, and say what to pass instead."""
    if type(leaf).__module__.partition(".")[0] == "keras":
        return (
            f"the Keras variable {getattr(leaf, 'path', '')!r}: train the model by compile and fit, or make variables "
            "of its values and call model.stateless_call ('A loop of your own' in docs/keras.md)"
        )
    return f"{shortened(repr(leaf))}; replicax.as_variables makes them of a pytree"


def differentiable(leaves: Sequence[Any], what: str) -> list[Variable]:
    """The variables among the leaves of a pytree that have gradients, without counters and the like.

    Other leaves, such as the functions of a module, are skipped. Arrays and numbers in a pytree without variables are a
    mistake, a TypeError, and so is an array beside variables. A variable that is listed twice is a ValueError.
    """
    variables = [leaf for leaf in leaves if isinstance(leaf, Variable)]
    for leaf in leaves:
        if not isinstance(leaf, Variable) and (not variables or isinstance(leaf, jax.Array)):
            raise TypeError(f"{what}: expected Variables, got {_description_of(leaf)}")
    chosen = [v for v in variables if v.trainable or jnp.issubdtype(v.dtype, jnp.inexact)]
    for v, count in collections.Counter(chosen).items():
        if count > 1:
            raise ValueError(f"{what}: {v.describe()} is listed twice, and has one gradient")
    return chosen
