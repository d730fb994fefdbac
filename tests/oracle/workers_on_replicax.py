"""What programs' functions may ask on a worker, of Replicax: a module, as functions are sent to other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import replicax
from replicax import _jax


def function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, as it is scheduled: in debug mode if the scheduling program is."""
    return replicax.debug()(fn) if _jax.debugging.get() else fn


strategy = replicax.get_strategy
replica_context = replicax.get_replica_context
array = jnp.asarray
total = jnp.sum
variable = replicax.Variable


def require(condition: Any) -> None:
    """Fail unless a condition holds."""
    if not condition:
        raise ValueError("it does not hold")


def dataset(values: Sequence[float]) -> Any:
    """A dataset of numbers."""
    return [np.asarray(value, np.float32) for value in values]


def dataset_of(values: Sequence[Any], context: Any) -> Callable[[], Iterator[Any]]:
    """What a function of the input context returns."""
    return lambda: iter(dataset(values))


def whole(variable: Any) -> Any:
    """A variable's value."""
    return variable.read_value()


def rows(variable: Any, ids: Any) -> Any:
    """Rows of a variable."""
    return variable[ids]


def add_rows(variable: Any, ids: Sequence[int], values: Sequence[Any]) -> None:
    """Add to rows of a variable."""
    variable.scatter_add(replicax.IndexedSlices(jnp.asarray(values), jnp.asarray(ids), variable.shape))


def value_and_grad(loss: Callable[[], Any], variables: Sequence[Any]) -> Any:
    """The loss, and its gradients."""
    return replicax.value_and_grad(loss, list(variables))()
