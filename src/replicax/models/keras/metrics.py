"""Metrics: updates a model's metrics with the rows of all replicas, so that they are the same on each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.models.keras.replica_step import ReplicaStep, running_step


def leaf_metrics(model: Any) -> Iterator[Any]:
    """The metrics of a model; for a container of metrics its members."""
    for metric in model.metrics:
        yield from metric.metrics if type(metric).__name__ == "CompileMetrics" else [metric]


def common_update(metric: Any, update: Callable[..., Any]) -> Callable[..., Any]:
    """``metric.update_state`` with the rows of all replicas."""

    @functools.wraps(update)
    def update_state(*args: Any, **kwargs: Any) -> Any:
        step = running_step()
        if step is None or not step.several:
            return update(*args, **kwargs)
        with step.inside("a metric") as is_outermost:
            if not is_outermost:
                return update(*args, **kwargs)
            if not any(_is_batch(leaf) for leaf in jax.tree_util.tree_leaves((args, kwargs))):
                return _update_with_numbers(step, update, args, kwargs)
            if _is_sum(metric):
                return _update_sums(step, metric, update, args, kwargs)
            return _update_with_all(step, update, args, kwargs)

    return update_state


def common_number(function: Callable[..., Any]) -> Callable[..., Any]:
    """A metric's function that computes a single number from a batch, applied to the rows of all replicas.

    ``lambda y, p: ops.mean(…)`` is one; Keras' own functions return one number for each row.
    """

    @functools.wraps(function)
    def common(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        step = running_step()
        if step is None or step.number_is_common is None or getattr(value, "ndim", None) != 0:
            return value
        [mean] = step.mean([value])
        step.number_is_common = True
        return mean

    return common


def _is_batch(value: Any) -> bool:
    return getattr(value, "ndim", 0) > 0


def _is_sum(metric: Any) -> bool:
    """Return whether the metric stores sums over rows, as all of Keras' own do."""
    definers = (kind for kind in type(metric).__mro__ if "update_state" in vars(kind))
    return next(definers).__module__.partition(".")[0] == "keras"


def _update_with_numbers(step: ReplicaStep, update: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Update with a number that a step computes, such as its loss, as a mean over rows, and with the number of rows."""
    args, kwargs = list(args), dict(kwargs)
    if len(args) == 2 and "sample_weight" not in kwargs:
        kwargs["sample_weight"] = args.pop()
    weight = kwargs.pop("sample_weight", None)
    args, kwargs = step.means_in((args, kwargs), _is_computed)
    if weight is not None:
        kwargs["sample_weight"] = _common_weight(step, weight)
    return update(*args, **kwargs)


def _common_weight(step: ReplicaStep, weight: Any) -> Any:
    """The weight of the whole batch, from that of a replica's rows.

    An int that is a multiple of their number depends on it, as the number of words does. Any other number is the same
    for each batch, however many replicas have rows of it. A computed weight is a sum over rows.
    """
    if isinstance(weight, int) and weight % step.own_rows == 0:
        return weight // step.own_rows * step.rows
    if isinstance(weight, int | float | np.generic):
        return weight
    [total] = step.sum([jnp.asarray(weight)])
    return total


def _is_computed(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _update_sums(step: ReplicaStep, metric: Any, update: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Update a metric that consists of sums: each replica adds up its own rows, then the sums are added."""
    variables = list(metric.variables)
    before = [v.value for v in variables]
    for v in variables:
        v.assign(jnp.zeros_like(v.value))
    step.number_is_common = False
    result = update(*args, **kwargs)
    is_common, step.number_is_common = step.number_is_common, None
    sums = [v.value for v in variables]
    for v, old, more in zip(variables, before, sums if is_common else step.sum(sums), strict=True):
        v.assign(old + more)
    return result


def _update_with_all(step: ReplicaStep, update: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Update any other metric with the rows of all replicas."""
    leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
    leaves = [step.gather(leaf) if _is_batch(leaf) else leaf for leaf in leaves]
    args, kwargs = jax.tree_util.tree_unflatten(tree, leaves)
    return update(*args, **kwargs)
