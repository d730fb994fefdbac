"""Checks of arguments that many functions take: enums, names, numbers, arrays, and paths."""

from __future__ import annotations

import contextlib
import enum
import numbers
import operator
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

_Enum = TypeVar("_Enum", bound=enum.Enum)


def parse_enum(kind: type[_Enum], value: Any, what: str) -> _Enum:
    """The member of ``kind`` that ``value`` is, or names in any case.

    For anything else a ValueError calls it ``what``, and lists the names.
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
    """``name``; a TypeError that begins with ``what`` if it is neither a string nor ``None``."""
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
    """``value`` as an int; a ValueError about ``what`` if it is no integer, or below ``least``.

    The ``note`` follows the smallest value in the message: what else is allowed, or what the integer means.
    """
    integer = as_integer(value)
    if integer is None or integer < least:
        raise ValueError(f"{what} must be an int of at least {least}{note}, got {value!r}")
    return integer


def as_keys(value: Any) -> frozenset[str] | None:
    """The strings in ``value`` as a set; ``None`` if it is a single string, or no iterable of strings."""
    keys: list[Any] = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [None]
    return frozenset(keys) if all(isinstance(key, str) for key in keys) else None


def text_of(where: str | Callable[[], str]) -> str:
    """``where`` something stands, for a message: a text, or what makes it, as most are never needed."""
    return where() if callable(where) else where


def check_unmasked(value: Any, where: str | Callable[[], str]) -> None:
    """Raise a TypeError that begins with ``where`` if ``value`` is a masked array of NumPy: its mask would be lost."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{text_of(where)} is a masked array, whose mask would be lost: fill it with .filled(…), or pass the mask "
            "as an array of its own"
        )


def checked_path(value: Any, what: str, note: str = "") -> str:
    """``value``, the user's argument ``what``, as a path.

    The ``note`` follows the value in messages: what else is allowed, or what to do instead.

    Raises:
      TypeError: it is not a path.
      ValueError: it is empty, as a shell's unset variable is: that would be the current folder.
    """
    try:
        path = os.fsdecode(value)
    except TypeError:
        raise TypeError(f"{what} must be a path, a str or an os.PathLike, got {value!r}{note}") from None
    if not path:
        raise ValueError(f"{what} must be a path, got an empty string (the current folder is '.')")
    return path


def checked_folder(value: Any, what: str, note: str = "") -> str:
    """``value``, the user's argument ``what``, as an absolute path of a checkpoint; as :func:`checked_path`.

    Raises:
      FileNotFoundError: it is relative, and the current folder has been deleted.
      ValueError: it can't be written in UTF-8, in which TensorStore takes paths.
    """
    path = checked_path(value, what, note)
    try:
        path = os.path.abspath(path)
        path.encode()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{what} is relative, {path!r}, and the current folder has been deleted: pass an absolute path"
        ) from None
    except UnicodeEncodeError:
        raise ValueError(f"{what} must be a path in UTF-8, got {path!r}: rename the folder") from None
    return path
