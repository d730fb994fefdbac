"""Patches of Keras for a replica's step, active while a step's Python runs.

At other times, and on other threads, Keras is unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
from keras.src import ops
from keras.src.layers.layer import Layer
from keras.src.layers.normalization.batch_normalization import BatchNormalization
from keras.src.losses import loss as loss_module
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random.seed_generator import SeedGenerator

from replicax.models.keras.metrics import common_number, common_update, leaf_metrics
from replicax.models.keras.replica_step import ReplicaStep, running_step


class _Patch:
    """A patch of one attribute, active as long as it is needed."""

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self.owner, self.name, self.users = owner, name, 0
        self._own = vars(owner).get(name)
        new = make(getattr(owner, name, None))
        _set(owner, name, new)

    def undo(self) -> None:
        """Restore the original."""
        if self._own is not None:
            _set(self.owner, self.name, self._own)
        elif isinstance(self.owner, type):
            delattr(self.owner, self.name)
        else:
            object.__delattr__(self.owner, self.name)


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, without Keras tracking it on its objects."""
    (setattr if isinstance(owner, type | types.ModuleType) else object.__setattr__)(owner, name, value)


# Before 3.14 Keras did not divide a layer's activity regularization by the number of rows.
_ACTIVITIES_ARE_SUMS = tuple(map(int, keras.__version__.split(".")[:2])) < (3, 14)

_lock = threading.RLock()
_present: dict[tuple[int, str], _Patch] = {}


@contextlib.contextmanager
def patched(model: Any) -> Iterator[None]:
    """Make the parts of Keras that ``model`` uses act as one replica's part, inside this context.

    Several contexts may be open, on several threads.
    """
    patches: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (loss_module, "reduce_weighted_values", _common_loss),
        (BatchNormalization, "_moments", _common_moments),
        (SeedGenerator, "next", _own_seed),
        (Layer, "_losses_override", _OwnLosses),
    ]
    for metric in leaf_metrics(model):
        patches.append((metric, "update_state", functools.partial(common_update, metric)))
        if callable(vars(metric).get("_fn")):
            patches.append((metric, "_fn", common_number))
    if _ACTIVITIES_ARE_SUMS:
        regularized = [layer for layer in model._flatten_layers() if layer.activity_regularizer is not None]
        patches += [(layer, "activity_regularizer", _common_sum) for layer in regularized]
    for kind in _kinds_of_optimizers():
        steps = {"stateless_apply": _common_step, "apply": _common_update}
        patches += [(kind, name, common) for name, common in steps.items() if name in vars(kind)]
    with _lock:
        for owner, name, make in patches:
            key = id(owner), name
            if key not in _present:
                _present[key] = _Patch(owner, name, make)
            _present[key].users += 1
    try:
        yield
    finally:
        with _lock:
            for owner, name, _ in reversed(patches):
                patch = _present[id(owner), name]
                patch.users -= 1
                if not patch.users:
                    del _present[id(owner), name]
                    patch.undo()


def _kinds_of_optimizers() -> list[type]:
    """All optimizer classes: a step may have several, and they may contain others."""
    kinds: list[type] = [BaseOptimizer]
    for kind in kinds:
        below: list[type] = kind.__subclasses__()
        kinds += [k for k in below if k not in kinds]
    return kinds


def _common_loss(reduce: Callable[..., Any]) -> Callable[..., Any]:
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


def _common_moments(moments: Callable[..., Any]) -> Callable[..., Any]:
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


def _own_seed(draw: Callable[..., Any]) -> Callable[..., Any]:
    """``SeedGenerator.next`` with different numbers on each replica; the stored seed is the same on all."""

    @functools.wraps(draw)
    def next(self: Any, *args: Any, **kwargs: Any) -> Any:
        seed = draw(self, *args, **kwargs)
        step = running_step()
        if step is None or not step.several:
            return seed
        return jax.random.fold_in(seed, step.replica.replica_id_in_sync_group)

    return next


def _common_sum(regularizer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A regularizer of activities, which sums over rows, divided by the rows of the whole batch."""

    @functools.wraps(regularizer)
    def regularized(activities: Any) -> Any:
        loss = regularizer(activities)
        step = running_step()
        return loss if step is None or activities.ndim == 0 else step.as_mean(loss)

    return regularized


def _common_step(apply: Callable[..., Any]) -> Callable[..., Any]:
    """``Optimizer.stateless_apply`` with the gradients of the whole batch."""

    @functools.wraps(apply)
    def stateless_apply(self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        with _of_whole_batch(grads) as common:
            return apply(self, optimizer_variables, common, trainable_variables)

    return stateless_apply


def _common_update(update: Callable[..., Any]) -> Callable[..., Any]:
    """``Optimizer.apply`` with the gradients of the whole batch."""

    @functools.wraps(update)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        with _of_whole_batch(grads) as common:
            return update(self, common, trainable_variables)

    return apply


@contextlib.contextmanager
def _of_whole_batch(gradients: Any) -> Iterator[Any]:
    """The gradients of the whole batch, from this replica's; averaged only once, even if the optimizer calls others."""
    step = running_step()
    if step is None:
        yield gradients
        return
    with step.inside("an optimizer") as is_outermost:
        if is_outermost:
            leaves, tree = jax.tree_util.tree_flatten(gradients)  # None for a variable without influence on the loss
            gradients = jax.tree_util.tree_unflatten(tree, step.mean(leaves))
        yield gradients


class _OwnLosses:
    """``Layer._losses_override``, through which Keras passes a model's losses to its ``compute_loss``: one per replica.

    In the per-replica executor another replica's step may run in between.
    """

    def __init__(self, none: None) -> None:
        pass

    def __get__(self, layer: Any, kind: Any = None) -> Any:
        return self._all_of(layer).get(*self._key_of(layer))

    def __set__(self, layer: Any, losses: Any) -> None:
        self._all_of(layer)[self._key_of(layer)[0]] = losses

    @staticmethod
    def _all_of(layer: Any) -> Any:
        step = running_step()
        return vars(layer) if step is None else step.layers_losses

    @staticmethod
    def _key_of(layer: Any) -> tuple[Any, Any]:
        """The key for a layer's losses, and the default."""
        return ("_losses_override", None) if running_step() is None else (id(layer), [])
