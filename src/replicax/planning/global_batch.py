"""Count the examples that a step takes: the same number for every placement, so that plans can be compared."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import jax


def examples_of(element_spec: Any) -> int | None:
    """Return a replica's number of examples: the size of dim 0 of each described array; ``None`` if there are none.

    >>> examples_of({"x": jax.ShapeDtypeStruct((32, 784), "float32"), "y": jax.ShapeDtypeStruct((32,), "int32")})
    32
    """
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(element_spec) if _has_examples(leaf)}
    if len(sizes) > 1:
        raise ValueError(
            f"dim 0 of an element's arrays should be its examples, but it has {', '.join(map(str, sorted(sizes)))} of "
            "them: the number of examples can't be changed"
        )
    return sizes.pop() if sizes else None


def examples_together(element_spec: Any, replicas: int) -> int | None:
    """Return the examples of a step on all replicas; ``None`` if the arrays that it takes don't agree."""
    try:
        each = examples_of(element_spec)
    except ValueError:
        return None
    return None if each is None else each * replicas


def tokens_of(element_spec: Any) -> int | None:
    """Return the tokens of each example: the size of dim 1 of integers ``[examples, tokens]``; ``None`` without any.

    Of several such arrays, as of a text and its translation, it is the largest.

    >>> tokens_of({"text": jax.ShapeDtypeStruct((4, 2048), "int32"), "weight": jax.ShapeDtypeStruct((4,), "float32")})
    2048
    """
    texts = (leaf for leaf in jax.tree.leaves(element_spec) if _has_examples(leaf) and len(leaf.shape) == 2)
    sizes = [leaf.shape[1] for leaf in texts if jax.numpy.issubdtype(leaf.dtype, jax.numpy.integer)]
    return max(sizes, default=None)


def with_examples(element_spec: Any, examples: int | Fraction) -> Any:
    """``element_spec`` with another number of examples in each described array.

    >>> with_examples(jax.ShapeDtypeStruct((32, 784), "float32"), 8)
    ShapeDtypeStruct(shape=(8, 784), dtype=float32)
    """
    if examples_of(element_spec) is None:
        return element_spec
    number = Fraction(examples)
    if number.denominator != 1 or number < 1:
        raise ValueError(
            f"a replica would have {number} examples of the batch: choose another batch, or other replicas"
        )

    def changed(leaf: Any) -> Any:
        if not _has_examples(leaf):
            return leaf
        return type(leaf)((int(number), *leaf.shape[1:]), leaf.dtype)  # padded, if it was

    return jax.tree.map(changed, element_spec)


def _has_examples(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) and len(leaf.shape) > 0
