"""Numbers in words, for tables and pictures."""

from __future__ import annotations

import unicodedata

_COUNTS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def printable(text: str) -> str:
    r"""``text`` with escapes for what would act on a terminal, or is in no file: control characters and surrogates.

    >>> from replicax.planning.render.numbers import printable
    >>> printable("w\x1b[31m"), printable("two\nlines")
    ('w\\x1b[31m', 'two\nlines')
    """
    return "".join(ascii(c)[1:-1] if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t" else c for c in text)


def count_in_words(number: float) -> str:
    """A large number with three digits.

    >>> from replicax.planning.render.numbers import count_in_words
    >>> count_in_words(17514876633088), count_in_words(12)
    ('17.5 T', '12 ')
    """
    for unit, name in _COUNTS:
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.3g} "


def seconds_in_words(seconds: float) -> str:
    """A time in the unit that suits it.

    >>> from replicax.planning.render.numbers import seconds_in_words
    >>> seconds_in_words(0.0417), seconds_in_words(3.2e-6), seconds_in_words(0)
    ('41.7 ms', '3.2 µs', '0 s')
    """
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"
