"""Enums, and the strings that name their members."""

from __future__ import annotations

import enum
from typing import Any, TypeVar

_Enum = TypeVar("_Enum", bound=enum.Enum)


def parse_enum(kind: type[_Enum], value: Any, what: str) -> _Enum:
    """The member of ``kind`` that ``value`` is, or names, in any case.

    Raises:
      ValueError: it is neither; the message calls it ``what``, and lists the names.
    """
    if isinstance(value, kind):
        return value
    names = [member.value for member in kind]
    name = value.lower().replace("-", "_") if isinstance(value, str) else None
    if name in names:
        return kind(name)
    raise ValueError(f"{what} must be one of {', '.join(map(repr, names))} or a {kind.__name__}, got {value!r}")
