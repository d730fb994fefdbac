"""Sizes of memory in words."""

from __future__ import annotations

_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def bytes_in_words(size: float) -> str:
    """A size in the unit that suits it.

    >>> from replicax.devices.memory_sizes import bytes_in_words
    >>> bytes_in_words(3 * 2**29), bytes_in_words(12)
    ('1.50 GiB', '12 B')
    """
    unit, name = unit_of(size)
    return f"{size:,.0f} B" if unit == 1 else f"{size / unit:,.2f} {name}"


def unit_of(size: float) -> tuple[int, str]:
    """The unit that suits a size: how many bytes it has, and its name."""
    return next(((unit, name) for unit, name in _UNITS if size >= unit), (1, "B"))
