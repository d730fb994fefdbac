"""Pairs of a gradient and its variable, as a caller passes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from replicax.devices.host_values import check_numbers
from replicax.indexed_slices import is_slices
from replicax.variables import Variable


def pairs_of(grads_and_vars: Any) -> list[tuple[Any, Variable]]:
    """The pairs in ``grads_and_vars``, with gradients that may be ``None``.

    Raises:
      TypeError: it is not an iterable of pairs of a gradient and a variable.
    """
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
