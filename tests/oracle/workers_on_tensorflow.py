"""What programs' functions may ask on a worker, of TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

function = tf.function
strategy = tf.distribute.get_strategy
replica_context = tf.distribute.get_replica_context
array = tf.convert_to_tensor
total = tf.reduce_sum
variable = tf.Variable


def require(condition: Any) -> None:
    """Fail unless a condition holds."""
    tf.debugging.Assert(condition, ["it does not hold"])


def dataset(values: Sequence[float]) -> Any:
    """A dataset of numbers."""
    return tf.data.Dataset.from_tensor_slices(values)


def dataset_of(values: Sequence[Any], context: Any) -> Any:
    """What a function of the input context returns."""
    return dataset(values)


def whole(variable: Any) -> Any:
    """A variable's value."""
    return tf.convert_to_tensor(variable)


def rows(variable: Any, ids: Any) -> Any:
    """Rows of a variable."""
    return tf.nn.embedding_lookup(variable, ids)


def add_rows(variable: Any, ids: Sequence[int], values: Sequence[Any]) -> None:
    """Add to rows of a variable."""
    variable.scatter_add(tf.IndexedSlices(tf.constant(values), tf.constant(ids)))


def value_and_grad(loss: Callable[[], Any], variables: Sequence[Any]) -> Any:
    """The loss, and its gradients."""
    with tf.GradientTape() as tape:
        value = loss()
    return value, tape.gradient(value, list(variables))
