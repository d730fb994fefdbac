"""Arguments that are only described, so that a step can be traced and compiled before there are any."""

from __future__ import annotations

from typing import Any

import jax

from replicax.execution.replica_values import example_mask
from replicax.pytrees import is_leaf, registered
from replicax.values import PerReplica, Stacked, padded
from replicax.workers.replicas import Replicas


class PaddedShapeDtypeStruct(jax.ShapeDtypeStruct):
    """One replica's shape and dtype of an array of which some rows, along dim 0, may be padding."""


def abstract_arrays(tree: Any, replicas: Replicas) -> Any:
    """``tree`` with what stands for arrays wherever it has a ``jax.ShapeDtypeStruct``, of one replica's shape.

    They are what an element is: ``PerReplica`` values, padded or not, or with one replica bare arrays.
    """
    count = replicas.count

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        array: Any = jax.ShapeDtypeStruct((count, *leaf.shape), dtype)
        if isinstance(leaf, PaddedShapeDtypeStruct):
            rows = leaf.shape[0]
            return padded(array, example_mask((rows,) * count, rows, replicas.mesh))
        return jax.ShapeDtypeStruct(leaf.shape, dtype) if count == 1 else PerReplica(Stacked(array))

    return jax.tree_util.tree_map(one, registered(tree), is_leaf=is_leaf)
