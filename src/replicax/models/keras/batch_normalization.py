"""Batch normalization over the rows of all replicas (``synchronized=True``)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from replicax.models.keras.replica_step import ReplicaStep, running_step


def common_moments(moments: Callable[..., Any]) -> Callable[..., Any]:
    """``BatchNormalization._moments`` for the rows of all replicas if the layer is ``synchronized``.

    One all-gather of the replicas' means and variances.
    """

    @functools.wraps(moments)
    def _moments(self: Any, inputs: Any, mask: Any) -> Any:
        step = running_step()
        if step is None or not self.synchronized:
            return moments(self, inputs, mask)
        object.__setattr__(self, "synchronized", False)  # Keras refuses it on JAX
        try:
            mean, variance = moments(self, inputs, mask)
        finally:
            object.__setattr__(self, "synchronized", True)
        return _joined_moments(step, mean, variance, mask) if step.several else (mean, variance)

    return _moments


def _joined_moments(step: ReplicaStep, mean: Any, variance: Any, mask: Any) -> tuple[Any, Any]:
    """The mean and variance of all rows, from each replica's."""
    both = step.of_each(jnp.stack([mean, variance]))
    means, variances = both[:, 0], both[:, 1]
    if mask is None:
        weights = step.weights.astype(mean.dtype)
    else:
        counts = step.of_each(jnp.sum(mask.astype(mean.dtype)))
        weights = counts / jnp.maximum(counts.sum(), 1)
    weights = weights.reshape(-1, *(1,) * (means.ndim - 1))
    mean = (weights * means).sum(0)
    return mean, (weights * (variances + jnp.square(means - mean[None]))).sum(0)
