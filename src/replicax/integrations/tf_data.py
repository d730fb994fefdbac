"""tf.data.Dataset: converts its batches to NumPy arrays, without copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import tensorflow as tf

from replicax.integrations.converted_dataset import Adapted
from replicax.pytrees import registered

_CURE = "Leave it out, or make dense numbers of it, with .map(…) before it comes here."


def adapt(dataset: Any) -> Adapted:
    """Convert a ``tf.data.Dataset`` to a re-iterable of its elements.

    Arrays are read-only views of TensorFlow's buffers. bfloat16 stays the bfloat16 of ``ml_dtypes``. Raises a TypeError
    if a component is not a dense array of numbers, but ragged, sparse, a string, or something else.
    """
    for path, spec in jax.tree_util.tree_flatten_with_path(registered(dataset.element_spec))[0]:
        _check(spec, "element" + jax.tree_util.keystr(path))
    length = int(dataset.cardinality())  # negative: infinite, or unknown
    return Adapted(NumpyElements(dataset), length if length >= 0 else None, _unrepeatable(dataset))


class NumpyElements:
    """The elements of a ``tf.data.Dataset`` as pytrees of NumPy arrays."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset.as_numpy_iterator())


def _check(spec: Any, where: str) -> None:
    if isinstance(spec, tf.RaggedTensorSpec):
        what = "a ragged tensor (.to_tensor() pads it)"
    elif isinstance(spec, tf.SparseTensorSpec):
        what = "a sparse tensor (tf.sparse.to_dense makes it dense)"
    elif not isinstance(spec, tf.TensorSpec):
        what = f"no tensor, but described by {spec!r}"
    elif spec.dtype == tf.string:
        what = "a tensor of strings"
    elif not (spec.dtype.is_floating or spec.dtype.is_integer or spec.dtype.is_complex or spec.dtype.is_bool):
        what = f"a tensor of {spec.dtype.name}"
    else:
        return
    raise TypeError(f"tf.data.Dataset: {where} is {what}, which can't be laid on a device. {_CURE}")


def _unrepeatable(dataset: Any) -> str | None:
    """The first part of the pipeline that makes passes differ, as far as TensorFlow shows it."""
    if dataset.options().deterministic is False:
        return "it has options.deterministic = False, so the order of its elements depends on timing"
    nodes = [dataset]
    while nodes:
        node = nodes.pop()
        nodes.extend(node._inputs())
        if getattr(node, "_deterministic", None) == "false":
            return "a transformation has deterministic=False, so the order of its elements depends on timing"
        if getattr(node, "_reshuffle_each_iteration", None):
            return (
                "its shuffle draws another order for every pass: give it a seed and reshuffle_each_iteration=False, or "
                "shuffle with Grain"
            )
        if hasattr(node, "_seed") and hasattr(node, "_seed2") and int(node._seed) == int(node._seed2) == 0:
            return "it draws random numbers without a seed: pass seed=…"
        for function in node._functions():
            if operation := _random(function.function.graph):
                return f"a function in it draws random numbers ({operation}): use tf.random.stateless_… with a seed"
    return None


def _random(graph: Any) -> str | None:
    """A stateful random operation in a function or in those that it calls."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    stateful = {"RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "RandomShuffle"}
    stateful |= {"Multinomial", "RandomGammaGrad", "RandomGamma", "RandomPoissonV2", "ParameterizedTruncatedNormal"}
    return next((node.op for node in nodes if node.op in stateful), None)
