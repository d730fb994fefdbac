"""When are two functions the same step?

A lambda or closure made anew at each call is a new object with the same code and, mostly, the same captured
values; it should find the program of the last one. So a function's identity is its code, its defaults and what
it captures: numbers and strings by value, containers item by item, everything else by identity. (As with
``jax.jit``, globals and the insides of captured objects are not looked at.)
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

_BY_VALUE = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis))


class ById:
    """Equal to another only if both are of the same living object; holds the object weakly if it can."""

    __slots__ = ("_hash", "_ref", "_strong")

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        self._strong: Any = None
        self._ref: Any = None
        try:
            self._ref = weakref.ref(value)
        except TypeError:
            self._strong = value

    @property
    def value(self) -> Any:
        """The object; ``None`` if it is gone."""
        return self._strong if self._ref is None else self._ref()

    @property
    def is_dead(self) -> bool:
        """Whether the object is gone, so that nothing can equal this any more."""
        return self._ref is not None and self._ref() is None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, ById) and self._hash == other._hash and self.value is other.value is not None

    def __repr__(self) -> str:
        return repr(self.value)


class FunctionKey:
    """Equal to another if both stand for the same step.

    Attributes:
      code: the function's code object, or the callable itself.
      captured: each captured value, by name.
    """

    __slots__ = ("_hash", "captured", "code")

    def __init__(self, code: Any, captured: tuple[tuple[str, Any], ...]) -> None:
        self.code = code
        self.captured = captured
        self._hash = hash((code, captured))

    @property
    def is_dead(self) -> bool:
        """Whether something captured is gone, so that no function can have this key any more."""
        return _any_dead(self.code) or _any_dead(self.captured)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, FunctionKey)
            and self._hash == other._hash
            and self.code == other.code
            and self.captured == other.captured
        )


# A function that lives on and captures the same objects as last time keeps its key, whatever its size.
_keys: weakref.WeakKeyDictionary[types.FunctionType, tuple[tuple[ById, ...], FunctionKey]]
_keys = weakref.WeakKeyDictionary()


def function_key(fn: Callable[..., Any]) -> FunctionKey:
    """The key of ``fn``: a function, a method, a ``functools.partial`` of one, or any callable object."""
    if not isinstance(fn, types.FunctionType):
        captured: list[tuple[str, Any]] = []
        return FunctionKey(_collect(fn, captured, set()), tuple(captured))
    contents = _contents(fn)
    known = _keys.get(fn)
    if known is not None and all(a.value is b for a, b in zip(known[0], contents, strict=True)):
        return known[1]
    captured = []
    key = FunctionKey(_collect(fn, captured, set()), tuple(captured))
    _keys[fn] = tuple(map(ById, contents)), key
    return key


def _contents(fn: types.FunctionType) -> list[Any]:
    return [_cell(cell) for cell in fn.__closure__ or ()]


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _any_dead(value: Any) -> bool:
    if isinstance(value, ById):
        return value.is_dead
    return isinstance(value, tuple) and any(map(_any_dead, value))


def _collect(fn: Any, captured: list[tuple[str, Any]], seen: set[int]) -> Any:
    seen = seen | {id(fn)}
    if isinstance(fn, functools.partial):
        captured += [(f"args[{i}]", _freeze(value, seen)) for i, value in enumerate(fn.args)]
        captured += [(name, _freeze(value, seen)) for name, value in fn.keywords.items()]
        return _collect(fn.func, captured, seen)
    if isinstance(fn, types.MethodType):
        captured.append(("self", ById(fn.__self__)))
        return _collect(fn.__func__, captured, seen)
    if not isinstance(fn, types.FunctionType):
        return ById(fn)
    names = fn.__code__.co_freevars
    captured += [(name, _freeze(value, seen)) for name, value in zip(names, _contents(fn), strict=True)]
    captured += [(name, _freeze(value, seen)) for name, value in _defaults(fn)]
    return fn.__code__


def _defaults(fn: types.FunctionType) -> list[tuple[str, Any]]:
    positional = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    values = fn.__defaults__ or ()
    pairs = list(zip(positional[len(positional) - len(values) :], values, strict=True))
    return pairs + list((fn.__kwdefaults__ or {}).items())


def _freeze(value: Any, seen: set[int]) -> Any:
    if type(value) in _BY_VALUE:
        # repr, because 0.0 == -0.0
        return type(value), repr(value) if type(value) in (float, complex) else value
    if id(value) in seen:
        return ById(value)
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        nested: list[tuple[str, Any]] = []
        return _collect(value, nested, seen), tuple(nested)
    if type(value) in (tuple, list, dict):
        seen = seen | {id(value)}
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return type(value), tuple((_freeze(k, seen), _freeze(v, seen)) for k, v in items)
    return ById(value)
