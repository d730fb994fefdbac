"""Functions that XLA compiles apart from what is around them.

XLA inlines called functions, and then merges operations with those that use their results, however many do.
``lax.optimization_barrier`` keeps operations from being simplified together, but is gone before that. A function with
the attribute ``inlineable="false"`` stays one: its operands and results are in memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata


def compiled_apart(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, of arrays, as a function that stays one in the compiled program."""
    jitted = jax.jit(fn)

    def call(*xs: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return jitted(*xs)

    return call


kept = compiled_apart(lambda x: x)
"""An array that is computed once, and is in memory."""

_not_known = compiled_apart(lambda *xs: xs)


def cut_alike(array: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """One array of each shape, from the elements of a vector in their order.

    XLA merges a slice with the operations that use it. Operations on slices at different offsets are different kernels
    then, and hundreds of updates of an optimizer take hundreds of kernels to compile. Here the offsets are operands
    that XLA does not know, so equal operations on equal shapes share a kernel.
    """
    sizes = [math.prod(shape) for shape in shapes]
    starts = [jnp.int32(start) for start in itertools.accumulate(sizes[:-1], initial=0)]
    # Without the barrier XLA puts its constants into the function.
    starts = _not_known(*lax.optimization_barrier(starts))
    return [
        lax.dynamic_slice(array, (start,), (size,), allow_negative_indices=False).reshape(shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=True)
    ]
