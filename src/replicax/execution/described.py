"""Arguments that are only described, so that a step can be traced and compiled before there are any."""

from __future__ import annotations

from typing import Any

import jax

from replicax.nests import is_leaf, known
from replicax.values import PerReplica, Stacked


def described(tree: Any, replicas: int) -> Any:
    """``tree`` with what stands for arrays wherever it has a ``jax.ShapeDtypeStruct``, of one replica's shape.

    They are what an element is: ``PerReplica`` values, or with one replica bare arrays.
    """

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        if replicas == 1:
            return jax.ShapeDtypeStruct(leaf.shape, dtype)
        array: Any = jax.ShapeDtypeStruct((replicas, *leaf.shape), dtype)
        return PerReplica(Stacked(array))

    return jax.tree_util.tree_map(one, known(tree), is_leaf=is_leaf)
