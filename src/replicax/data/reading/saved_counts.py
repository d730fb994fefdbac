"""Counts out of a saved state: whether a pass over the dataset can have come to them."""

from __future__ import annotations

from typing import Any


def check_count(number: Any, what: str, most: int | None = None, least: int = 0) -> None:
    """Raise unless ``number``, out of a state, is one that a pass over the dataset can have come to.

    Raises:
      ValueError: it is no integer, or outside ``least`` and ``most``.

    >>> from replicax.data.reading.saved_counts import check_count
    >>> check_count(-5, "the position of the state", 8)
    Traceback (most recent call last):
    ValueError: the position of the state must be an integer from 0 to 8, as far as this dataset goes, got -5
    """
    is_integer = isinstance(number, int) and not isinstance(number, bool)
    if not is_integer or number < least or (most is not None and number > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}, as far as this dataset goes"
        raise ValueError(f"{what} must be an integer {limits}, got {number!r}")
