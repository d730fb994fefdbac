"""Fingerprints: whether arrays are equal, told from a few bytes of each."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.topology.placement import here

Fingerprint = tuple[str, tuple[int, ...], bytes]
"""The dtype's name, the shape, and a digest of the numbers."""


def fingerprint(value: Any) -> Fingerprint:
    """The same for arrays of one dtype and shape with equal elements, where NaN equals NaN; else another.

    >>> import jax.numpy as jnp
    >>> from replicax.topology.fingerprints import fingerprint
    >>> fingerprint(jnp.array([0.0, jnp.nan])) == fingerprint(jnp.array([-0.0, jnp.nan]))
    True
    """
    value = here(value) if isinstance(value, jax.Array) else np.asarray(value)
    name = str(value.dtype)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    numbers = np.asarray(value)
    if jnp.issubdtype(numbers.dtype, jnp.inexact):
        numbers = numbers + np.zeros((), numbers.dtype)  # -0 becomes 0
        is_nan = np.isnan(numbers)
        if is_nan.any():
            numbers = np.where(is_nan, np.full((), np.nan, numbers.dtype), numbers)
    digest = hashlib.blake2b(np.ascontiguousarray(numbers).tobytes(), digest_size=16).digest()
    return name, tuple(value.shape), digest
