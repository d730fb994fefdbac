"""Digests: compare arrays by a few bytes of each."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.devices.arrays import here

Digest = tuple[str, tuple[int, ...], Any]
"""The dtype's name, the shape, and a digest of the numbers (or :class:`ExactNumbers`: all of them)."""


def digest(value: Any) -> Digest:
    """A digest: equal for arrays of one dtype and shape with equal elements (NaN equals NaN), different otherwise.

    >>> import jax.numpy as jnp
    >>> from replicax.workers.digests import digest
    >>> digest(jnp.array([0.0, jnp.nan])) == digest(jnp.array([-0.0, jnp.nan]))
    True
    """
    name, shape, numbers = _numbers_of(value)
    if jnp.issubdtype(numbers.dtype, jnp.inexact):
        numbers = numbers + np.zeros((), numbers.dtype)  # -0 becomes 0
        is_nan = np.isnan(numbers)
        if is_nan.any():
            numbers = np.where(is_nan, np.full((), np.nan, numbers.dtype), numbers)
    digest = hashlib.blake2b(np.ascontiguousarray(numbers).tobytes(), digest_size=16).digest()
    return name, shape, digest


def unabridged(value: Any) -> Digest:
    """Compares with others of its kind as digests do, in a fraction of the time; but it holds the array.

    >>> import jax.numpy as jnp
    >>> from replicax.workers.digests import unabridged
    >>> unabridged(jnp.array([0.0, jnp.nan])) == unabridged(jnp.array([-0.0, jnp.nan]))
    True
    """
    name, shape, numbers = _numbers_of(value)
    return name, shape, ExactNumbers(numbers)


class ExactNumbers:
    """Equal to others of the same dtype and shape if the elements are, where NaN equals NaN."""

    __slots__ = ("_numbers",)

    def __init__(self, numbers: np.ndarray[Any, Any]) -> None:
        self._numbers = np.ascontiguousarray(numbers).reshape(-1)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ExactNumbers):
            return NotImplemented
        a, b = self._numbers, other._numbers
        bits = np.dtype(f"u{a.dtype.itemsize}" if a.dtype.itemsize in (1, 2, 4, 8) else "u1")
        if np.array_equal(a.view(bits), b.view(bits)):
            return True
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            return False
        return bool(np.all((a == b) | (np.isnan(a) & np.isnan(b))))

    __hash__ = None  # type: ignore[assignment]


def _numbers_of(value: Any) -> tuple[str, tuple[int, ...], np.ndarray[Any, Any]]:
    """The dtype's name, the shape, and the elements; those of random keys are their data."""
    value = here(value) if isinstance(value, jax.Array) else np.asarray(value)
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return str(value.dtype), tuple(value.shape), np.asarray(jax.random.key_data(value) if is_key else value)
