"""Checks of calls of the user's function: ``fn``, ``args`` and ``kwargs``, and its result; the names in its code."""

from __future__ import annotations

import dis
import functools
import inspect
import reprlib
import types
from collections.abc import Callable, Mapping
from typing import Any


def checked_function(fn: Any, what: str, name: str = "fn") -> Any:
    """``fn``, if it is callable; otherwise a TypeError names the argument, and ``what`` it is an argument of."""
    if not callable(fn):
        raise TypeError(f"{what}: {name} must be callable, got {fn!r}")
    return fn


def without_partials(fn: Any) -> Any:
    """The function of a ``functools.partial``; ``fn`` itself if it is none."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def function_name(fn: Any) -> str:
    """The name of ``fn``, perhaps a ``functools.partial``, in messages."""
    fn = without_partials(fn)
    return str(getattr(fn, "__name__", type(fn).__name__))


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """The signature that ``fn`` is called by, and not that of a function that it wraps; ``None`` if it has none.

    A decorator may give the function that it wraps more arguments.
    """
    try:
        return inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):
        return None


def why_not_taken(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> str | None:
    """Why ``fn`` does not take these arguments, as Python says it; ``None`` if it does, or has no signature."""
    signature = signature_of(fn)
    try:
        if signature is not None:
            signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def default_arguments(fn: types.FunctionType) -> list[tuple[str, Any]]:
    """The defaults of a function, by name."""
    positional, values = fn.__code__.co_varnames[: fn.__code__.co_argcount], fn.__defaults__ or ()
    pairs = list(zip(positional[len(positional) - len(values) :], values, strict=True))
    return pairs + list((fn.__kwdefaults__ or {}).items())


def asks_class(value: Any) -> bool:
    """Return whether a method, a property or code may read attributes of a class, other than by its objects."""
    fn = value.fget if type(value) is property else value
    code = fn.__code__ if isinstance(fn, types.FunctionType) else fn
    if not isinstance(code, types.CodeType):
        return isinstance(value, classmethod)
    return not {"type", "__class__"}.isdisjoint((*global_names(code), *code.co_names))


@functools.cache
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The names that ``code``, and functions defined inside it, look up among the globals."""
    own = (i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    inner = (name for c in code.co_consts if isinstance(c, types.CodeType) for name in global_names(c))
    return tuple(dict.fromkeys([*own, *inner]))


def checked_args(args: Any, what: str) -> tuple[Any, ...]:
    """``args``, a tuple or a list, as a tuple; a TypeError for others, which would silently be taken apart."""
    if not isinstance(args, tuple | list):
        raise TypeError(f"{what}: args must be a tuple of arguments, got {_briefly(args)}; for one: args=(x,)")
    return tuple(args)


def checked_kwargs(kwargs: Any, what: str) -> dict[str, Any]:
    """``kwargs``, a mapping from strings or ``None``, as a dict; a TypeError for anything else."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise TypeError(
            f"{what}: kwargs must be a dict from names to arguments, got {_briefly(kwargs)}; arguments without a name "
            "go into one tuple: args=(x, y)"
        )
    return dict(kwargs)


def _briefly(value: Any) -> str:
    return " ".join(reprlib.repr(value).split())


def in_args_and_kwargs(signature: str, named: Mapping[str, Any]) -> str:
    """An error message that says where arguments of the user's function go."""
    if not named:
        return f"{signature} got more arguments than that: those of fn go into one tuple, args=(x, y)"
    shown = ", ".join(f"{name!r}: …" for name in named)
    names = ", ".join(map(repr, named))
    return f"{signature} has no argument {names}: arguments of fn go into args=(…), or by name into kwargs={{{shown}}}"


def has_not_run(result: Any) -> bool:
    """Return whether ``result`` comes from an async function or a generator, none of whose code has run yet."""
    return isinstance(result, types.CoroutineType | types.GeneratorType | types.AsyncGeneratorType)


def checked_result(result: Any, fn: Any, what: str) -> Any:
    """``result``, which ``fn`` has returned to ``what``.

    Raises a TypeError if nothing of ``fn`` has run, as it is an async function or a generator.
    """
    if not has_not_run(result):
        return result
    name = function_name(fn)
    if isinstance(result, types.GeneratorType):
        result.close()
        raise TypeError(
            f"{what}: {name} has yielded instead of returning, so nothing of it has run: it is a generator function, "
            "or returns a generator expression. Return what it computes, for example in a list"
        )
    if isinstance(result, types.CoroutineType):
        result.close()  # otherwise Python warns that it was never awaited
    raise TypeError(
        f"{what}: {name} is an async function, so calling it runs nothing of it: write it as an ordinary one, with "
        "def, and await before or after"
    )
