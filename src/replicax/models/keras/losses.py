"""Losses whose reduction is not a mean over rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from keras.src import ops
from keras.src.losses import loss as loss_module

from replicax.models.keras.replica_step import running_step


def common_loss(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Keras' ``reduce_weighted_values``, returning a replica's value whose mean over the replicas is the batch's loss.

    A sum is not a mean, and neither is a mean over the rows that a mask or sample weights select: a replica knows only
    its own part of the divisor. One all-reduce for such a mean.
    """

    @functools.wraps(reduce)
    def reduce_weighted_values(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        loss = reduce(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
        step = running_step()
        if step is None or not step.several or reduction in (None, "none") or len(values.shape) == 0:
            return loss
        if reduction == "sum":
            return step.as_mean(loss)
        divisor = _divisor(values, sample_weight, mask, reduction, loss.dtype)
        if divisor is None:
            return loss
        [divisor_of_batch] = step.sum([divisor])
        return step.as_mean(loss * ops.divide_no_nan(divisor, divisor_of_batch))

    return reduce_weighted_values


def _divisor(values: Any, sample_weight: Any, mask: Any, reduction: Any, dtype: Any) -> Any:
    """Keras' divisor of the sum of a replica's values; ``None`` if that is their number."""
    if reduction == "mean_with_sample_weight":
        weight = loss_module.apply_mask(
            None if sample_weight is None else ops.convert_to_tensor(sample_weight, dtype=dtype),
            None if mask is None else ops.convert_to_tensor(mask, dtype=dtype),
            dtype=dtype,
            reduction=reduction,
        )
        if weight is None:
            return None
        values = ops.convert_to_tensor(values, dtype=dtype)
        return ops.sum(loss_module.squeeze_or_expand_to_same_rank(values, ops.cast(weight, dtype))[1])
    return None if mask is None else ops.sum(ops.cast(mask, dtype))
