"""Checks of arguments that many functions take: enums, names, numbers, arrays, and paths."""

from __future__ import annotations

import contextlib
import enum
import numbers
import operator
import os
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

_Enum = TypeVar("_Enum", bound=enum.Enum)


def parse_enum(kind: type[_Enum], value: Any, what: str) -> _Enum:
    """Parse a member of ``kind``, or its name in any case.

    Raises:
      ValueError: it is neither; the message calls it ``what``, and lists the names.
    """
    if isinstance(value, kind):
        return value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return kind(value.lower().replace("-", "_"))
    names = ", ".join(repr(member.value) for member in kind)
    article = "an" if kind.__name__[0] in "AEIO" else "a"
    raise ValueError(f"{what} must be one of {names} or {article} {kind.__name__}, got {value!r}")


def checked_name(name: Any, what: str) -> str | None:
    """``name``, which must be a string or ``None``.

    Raises:
      TypeError: it is something else; the message begins with ``what``.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{what}: name must be a string or None, got {name!r}")
    return name


def is_number(value: Any) -> bool:
    """Whether it is a real number of Python or NumPy; a bool is not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def as_integer(value: Any) -> int | None:
    """``value`` as an int, even if it is a NumPy or JAX integer; ``None`` if it is not an integer, such as ``True``."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def checked_integer(value: Any, what: str, least: int = 1, note: str = "") -> int:
    """``value`` as an int.

    Args:
      value: the user's argument.
      what: its name in the message: ``"MirroredStrategy: num_replicas"``.
      least: the smallest valid integer.
      note: what else is allowed, or what the integer means; follows the smallest one in the message.

    Raises:
      ValueError: it is not an integer, or below ``least``.

    >>> from replicax.argument_checks import checked_integer
    >>> checked_integer(0, "use_cpu_devices(n): n")
    Traceback (most recent call last):
    ValueError: use_cpu_devices(n): n must be an int of at least 1, got 0
    """
    integer = as_integer(value)
    if integer is None or integer < least:
        raise ValueError(f"{what} must be an int of at least {least}{note}, got {value!r}")
    return integer


def text_of(where: str | Callable[[], str]) -> str:
    """``where`` something stands, for a message: a text, or what makes it, as most are never needed."""
    return where() if callable(where) else where


def check_unmasked(value: Any, where: str | Callable[[], str]) -> None:
    """Raise if ``value`` is a masked array of NumPy: its mask would be lost.

    Raises:
      TypeError: it is one; the message begins with ``where``.

    >>> import numpy as np
    >>> from replicax.argument_checks import check_unmasked
    >>> check_unmasked(np.ma.masked_array([1.0, 2.0], [False, True]), "x")
    Traceback (most recent call last):
    TypeError: x is a masked array, whose mask would be lost: fill it with .filled(…), or pass the mask ...
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{text_of(where)} is a masked array, whose mask would be lost: fill it with .filled(…), or pass the mask "
            "as an array of its own"
        )


def checked_path(value: Any, what: str, note: str = "") -> str:
    """``value`` as a path.

    Args:
      value: the user's argument.
      what: its name in the message.
      note: what else is allowed, or what to do instead; follows the value in the message.

    Raises:
      TypeError: it is not a path.
      ValueError: it is empty, as a shell's unset variable is: that would be the current folder.

    >>> from replicax.argument_checks import checked_path
    >>> checked_path(None, "Checkpoint.save(path)")
    Traceback (most recent call last):
    TypeError: Checkpoint.save(path) must be a path, a str or an os.PathLike, got None
    """
    try:
        path = os.fsdecode(value)
    except TypeError:
        raise TypeError(f"{what} must be a path, a str or an os.PathLike, got {value!r}{note}") from None
    if not path:
        raise ValueError(f"{what} must be a path, got an empty string (the current folder is '.')")
    return path
