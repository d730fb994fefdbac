"""Functions that XLA compiles apart from what is around them.

It makes what a program calls part of the program, and then merges operations with those that use their results, however
many do. ``lax.optimization_barrier`` keeps operations from being simplified together, but is gone before that. A
function with the attribute ``inlineable="false"`` stays one: what it is given and what it returns are in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata


def compiled_apart(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``fn``, of one array, as a function of the compiled program, too."""
    jitted = jax.jit(fn)

    def call(x: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return jitted(x)

    return call


def _itself(x: Any) -> Any:
    return x


def _turned_around(x: Any) -> Any:
    return lax.transpose(x, (1, 0))


kept = compiled_apart(_itself)
"""An array that is computed once, and is in memory."""

turned_around = compiled_apart(_turned_around)
"""The transpose of a matrix: what computes the matrix is not merged with it, nor is a product of it."""
