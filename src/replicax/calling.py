"""A call of somebody else's function: ``fn``, ``args`` and ``kwargs``, as every method takes them that calls one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def checked_function(fn: Any, what: str, name: str = "fn") -> Any:
    """``fn``, if it can be called.

    Raises:
      TypeError: it can't; the message says ``what`` takes it, and as which argument.
    """
    if not callable(fn):
        raise TypeError(f"{what}: {name} must be callable, got {fn!r}")
    return fn


def checked_args(args: Any, what: str) -> tuple[Any, ...]:
    """``args`` as a tuple.

    Raises:
      TypeError: it is neither a tuple nor a list. An array, a dict or a string would be taken apart without a word.
    """
    if not isinstance(args, tuple | list):
        raise TypeError(f"{what}: args must be a tuple of arguments, got {args!r}; for one: args=(x,)")
    return tuple(args)


def checked_kwargs(kwargs: Any, what: str) -> dict[str, Any]:
    """``kwargs`` as a dict; of ``None`` an empty one.

    Raises:
      TypeError: it is no mapping from strings.
    """
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise TypeError(
            f"{what}: kwargs must be a dict from names to arguments, got {kwargs!r}; arguments without a name go into "
            "one tuple: args=(x, y)"
        )
    return dict(kwargs)
