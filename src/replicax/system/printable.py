"""Text from users, such as names of variables, as it can be shown and written."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    r"""``text`` with escapes for what would act on a terminal, or may be in no file or SVG.

    >>> printable("w\x1b[31m"), printable("two\nlines")
    ('w\\x1b[31m', 'two\nlines')
    """
    return "".join(ascii(c)[1:-1] if c in "\ufffe\uffff" or _is_control(c) else c for c in text)


def _is_control(c: str) -> bool:
    """Return whether ``c`` is a control character or a surrogate."""
    return c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cs")
