"""Formats quantities: bytes, counts and seconds, each in a unit that suits its size."""

from __future__ import annotations

from collections.abc import Sequence

BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
COUNTS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def unit_of(amount: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The largest unit that is at most ``amount``, or the smallest; ``units`` start with the largest."""
    return next((unit for unit in units if amount >= unit[0]), units[-1])


def bytes_in_words(size: float) -> str:
    """Format a size of memory.

    >>> bytes_in_words(3 * 2**29), bytes_in_words(12)
    ('1.50 GiB', '12 B')
    """
    unit, name = unit_of(size, BYTES)
    return f"{size / unit:,.{0 if unit == 1 else 2}f} {name}"


def count_in_words(number: float) -> str:
    """Format a large number with three digits; the name of the counted thing follows.

    >>> count_in_words(17514876633088), count_in_words(12)
    ('17.5 T', '12 ')
    """
    unit, name = unit_of(number, COUNTS)
    return f"{number / unit:.3g} {name}"


def seconds_in_words(seconds: float) -> str:
    """Format a time with three digits.

    >>> seconds_in_words(0.0417), seconds_in_words(3.2e-6), seconds_in_words(0)
    ('41.7 ms', '3.2 µs', '0 s')
    """
    unit, name = unit_of(seconds, SECONDS) if seconds else SECONDS[0]
    return f"{seconds / unit:.3g} {name}"


def hours_in_words(seconds: float) -> str:
    """Format a time as hours, minutes and seconds, such as ``26:03:04``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def counted(number: int, what: str) -> str:
    """A number of things, which ``what`` calls one of.

    >>> counted(1, "replica"), counted(1024, "replica")
    ('1 replica', '1,024 replicas')
    """
    return f"{number:,} {what}{'s' * (number != 1)}"
