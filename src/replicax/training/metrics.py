"""Metrics: running means over batches and replicas, without padding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax import context
from replicax.argument_checks import checked_name, is_number
from replicax.collectives import mask_of_rows
from replicax.devices.host_values import as_array, check_numbers
from replicax.errors import ContextError
from replicax.name_hints import NameHints
from replicax.training.losses import along_rows
from replicax.variables.store import current_collection
from replicax.variables.variable import Variable


class Mean(NameHints):
    """The running mean of per-example values, over batches and replicas.

    Create it in the strategy's scope; call ``update`` in a step, and ``result`` and ``reset`` outside. Its sums are two
    on-read variables: each replica adds to its own copies, and ``result`` adds up the copies. On parameter servers they
    are two numbers, to which steps add. Every example has the same weight in every batch and on every replica;
    padding does not count.

    Args:
      name: of its variables.

    >>> import replicax, numpy as np
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     mean = replicax.Mean("loss")
    >>> float(mean.result())
    0.0
    >>> for batch in strategy.distribute_dataset([np.array([1.0, 2.0, 3.0, 4.0]), np.array([5.0, 9.0])]):
    ...     strategy.run(mean.update, args=(batch,))
    >>> float(mean.result())
    4.0
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = checked_name(name, type(self).__name__) or type(self).__name__.lower()
        synchronization = "on_read" if current_collection().has_copies else "on_write"
        self._total, self._weight = (
            Variable(
                0.0, name=f"{self.name}/{part}", trainable=False, synchronization=synchronization, aggregation="sum"
            )
            for part in ("total", "weight")
        )

    @property
    def variables(self) -> dict[str, Variable]:
        """The variables that have its sums."""
        return {"total": self._total, "weight": self._weight}

    def update(self, values: Any, sample_weight: Any | None = None) -> None:
        """Add this replica's values.

        Args:
          values: ``[batch, …]``; every number counts. A scalar counts once. Any real dtype; summed in float32.
          sample_weight: the weight of each value; its shape is that of the values or its first dims.

        Raises:
          TypeError: ``values`` or ``sample_weight`` are not numbers.
          ValueError: ``values`` or ``sample_weight`` are complex; ``sample_weight`` does not fit; or the batch is
            padded, and dim 0 of ``values`` is not its rows.
          ContextError: called in cross-replica context, or outside the metric's strategy.

        No collective, except on parameter servers, where a worker sums over its replicas.
        """
        replica, what = context.get_replica_context(), f"{type(self).__name__}.update"
        if replica is None or replica.strategy is not self._total.strategy:
            raise ContextError(
                f"{what} adds one replica's values: call it inside a step of "
                f"{self._total.strategy!r}, in whose scope the metric was created"
            )
        check_numbers(values, f"{what}: values")
        if sample_weight is not None:
            check_numbers(sample_weight, f"{what}: sample_weight")
        _check_real(what, values=values, sample_weight=sample_weight)
        values = jnp.asarray(values, jnp.float32)
        weight = jnp.asarray(1.0 if sample_weight is None else sample_weight, jnp.float32)
        if weight.shape != values.shape[: weight.ndim]:
            raise ValueError(
                f"{what}: sample_weight of shape {weight.shape} does not fit values of shape {values.shape}"
            )
        weight = jnp.broadcast_to(along_rows(weight, values), values.shape)
        if replica.example_mask is not None and values.ndim:
            mask = mask_of_rows(values, replica._communicator, f"{what}: values")
            real = along_rows(mask, values)
            values, weight = (jnp.where(real, x, jnp.zeros_like(x)) for x in (values, weight))
        self._total.assign_add(jnp.sum(values * weight))
        self._weight.assign_add(jnp.sum(weight))

    def result(self) -> jax.Array:
        """The mean of all values so far, over replicas: a mirrored scalar of JAX's default float dtype; 0 without any.

        Raises:
          ContextError: called in a step, where each replica has its own sums only.
        """
        _check_outside(f"{type(self).__name__}.result")
        total, weight = (jnp.asarray(v.read_value()) for v in (self._total, self._weight))
        mean: jax.Array = _mean(total, jax.device_put(weight, total.sharding))  # in a pipeline they may lie apart
        return mean

    def reset(self) -> None:
        """Set the sums to 0.

        Raises:
          ContextError: called in a step.
        """
        _check_outside(f"{type(self).__name__}.reset")
        for variable in (self._total, self._weight):
            variable.assign(np.zeros((), variable.dtype))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class Accuracy(Mean):
    """The share of examples that are predicted right, over batches and replicas; see :class:`Mean`.

    The predicted class depends on the shape and dtype of the predictions:

    ==================================  ==============================  ===============================================
    labels                              predictions                     predicted class
    ==================================  ==============================  ===============================================
    ``[batch, …]``                      integers of that shape          the prediction
    ``[batch, …]``                      ``[batch, …, classes]``         the class with the highest score
    ``[batch, …]``, 0 or 1              ``[batch, …, 1]``, floats       1 if the score is above the threshold, else 0
    ``[batch]`` or ``[…, 1]``, 0 or 1   floats of that shape            the same
    other shapes, 0 or 1                floats of that shape            the same; here you must give a threshold
    ==================================  ==============================  ===============================================

    Args:
      name: of its variables.
      threshold: for one score and two classes: a score above it predicts class 1. The default is 0.5, for
        probabilities; for logits give 0. A given threshold also says that each score is a decision of its own, where
        labels could be one-hot.

    Raises:
      ValueError: ``threshold`` is not a number.

    >>> import replicax, numpy as np
    >>> accuracy = replicax.Accuracy()
    >>> accuracy.update(np.array([0, 1, 1]), np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]]))
    >>> round(float(accuracy.result()), 4)
    0.6667
    >>> accuracy.reset()
    >>> accuracy.update(np.array([0, 1, 1]), np.array([0.2, 0.9, 0.4]))  # probabilities of class 1
    >>> round(float(accuracy.result()), 4)
    0.6667
    """

    def __init__(self, name: str | None = None, threshold: float | None = None) -> None:
        if threshold is not None and not is_number(threshold):
            raise ValueError(f"Accuracy: threshold must be a number, such as 0.5, got {threshold!r}")
        self.threshold = None if threshold is None else float(threshold)
        super().__init__(name)

    def update(self, labels: Any, predictions: Any, sample_weight: Any | None = None) -> None:  # type: ignore[override]
        """Add this replica's examples.

        Args:
          labels: ``[batch, …]``, the classes, integers.
          predictions: classes, or scores; see the table of the class.
          sample_weight: as in :meth:`Mean.update`, also for the errors.

        Raises:
          ValueError: the shapes of ``labels`` and ``predictions`` don't fit, or one is complex; or labels may be
            one-hot or not, and no threshold was given.
        """
        labels = as_array(labels, "Accuracy.update: labels")
        predictions = as_array(predictions, "Accuracy.update: predictions")
        _check_real("Accuracy.update", labels=labels, predictions=predictions)
        super().update(self._right(labels, predictions), sample_weight)

    def _right(self, labels: jax.Array, predictions: jax.Array) -> jax.Array:
        """Whether each label is predicted."""
        are_scores = jnp.issubdtype(predictions.dtype, jnp.inexact)
        has_classes = predictions.shape[:-1] == labels.shape and predictions.ndim == labels.ndim + 1
        if has_classes and predictions.shape[-1] == 1:  # argmax of one score would always be class 0
            predictions = predictions[..., 0]
        elif has_classes and predictions.shape[-1]:
            predictions, are_scores = jnp.argmax(predictions, axis=-1), False
        if predictions.shape != labels.shape:
            raise ValueError(
                f"Accuracy.update(labels, predictions): labels of shape {labels.shape} need predictions of that shape, "
                f"or with a further dim for the classes, got {predictions.shape}"
            )
        if are_scores:
            if self.threshold is None and not has_classes and labels.ndim > 1 and labels.shape[-1] > 1:
                raise ValueError(
                    f"Accuracy.update(labels, predictions): labels and scores have the same shape {labels.shape}. If "
                    "labels are one-hot, pass labels.argmax(-1). If each score is a decision of its own, use "
                    "Accuracy(threshold=0.5)."
                )
            predictions = (predictions > (0.5 if self.threshold is None else self.threshold)).astype(jnp.int32)
        common = jnp.result_type(float if jnp.issubdtype(labels.dtype, jnp.inexact) else int)
        return predictions.astype(common) == labels.astype(common)


@jax.jit
def _mean(total: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.where(weight == 0, jnp.zeros_like(total), total / jnp.where(weight == 0, jnp.ones_like(weight), weight))


def _check_outside(method: str) -> None:
    if context.in_step():
        raise ContextError(f"{method} was called inside a step: each replica has its own sums only. Call it outside.")


def _check_real(method: str, **numbers: Any) -> None:
    for name, given in numbers.items():
        if jnp.iscomplexobj(given):
            raise ValueError(f"{method}: {name} must be real, got {given!r}")
