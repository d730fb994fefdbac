"""Dtypes of variables: casts, shares and random keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def share_of(total: Any, replica: Any, num_replicas: int) -> Any:
    """One replica's share of ``total``. The shares add up to it; for integers exactly."""
    if jnp.issubdtype(total.dtype, jnp.inexact):
        return total / num_replicas
    quotient, remainder = total // num_replicas, total % num_replicas
    return jnp.where(jnp.asarray(replica) == 0, quotient + remainder, quotient)


def is_key(dtype: Any) -> bool:
    """Whether ``dtype`` is that of random keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def casts(source: Any, target: Any) -> bool:
    """Whether ``source`` converts to ``target`` within its kind, or to a wider kind."""
    if is_key(source) or is_key(target):
        return bool(source == target)
    order = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    rank = [next(i for i, kind in enumerate(order) if jnp.issubdtype(d, kind)) for d in (source, target)]
    return rank[0] <= rank[1]


def check_there(dtype: Any, what: Callable[[], str]) -> None:
    """Raise if JAX would change the dtype of the arrays of ``what``.

    Raises:
      RuntimeError: JAX's 64-bit numbers have been switched off after it was made.
    """
    if jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True) != dtype:
        raise RuntimeError(
            f"{what()} has the dtype {jnp.dtype(dtype).name}, but JAX's 64-bit numbers have been switched off since it "
            "was made: don't change jax_enable_x64 while the program runs"
        )


def kind_of(variable: Any) -> str:
    """``float32[2,3]``: dtype and shape, in a message."""
    name = getattr(variable.dtype, "name", str(variable.dtype))
    return f"{name}[{','.join(map(str, variable.shape))}]"
