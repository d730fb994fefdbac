"""When are two functions the same step?

A lambda or closure made anew at each call is a new object with the same code and, mostly, the same captured
values; it should find the program of the last one. So a function's identity is its code, its defaults and what
it captures: numbers and strings by value, containers and frozen dataclasses item by item, everything else by
identity (subclasses of list, dict and set also by their items). As with ``jax.jit``, the insides of captured objects
and globals of other modules are not looked at. For those of arguments, also of ``self`` if the step is a method, see
:mod:`replicax.execution.tracing.object_attributes`.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from replicax import _jax
from replicax.execution.tracing.object_attributes import ObjectKey, may_change, object_keys_in
from replicax.pytrees import CapturedVariable, Contents, IdentityKeys, Opaque, are_unchanged
from replicax.user_functions import default_arguments, function_name, global_names


class ByKey(Opaque):
    """Base of leaves that are compared by a key: two with equal keys are the same to a step."""

    __slots__ = ("key",)

    def __init__(self, key: Hashable) -> None:
        self.key = key


class FunctionKey(_jax.Hashed):
    """Equal to another if both stand for the same step."""

    __slots__ = ("_function", "_wrapped", "captured", "code", "places")

    def __init__(
        self,
        code: Any,
        captured: tuple[tuple[str, Any], ...],
        places: dict[Any, Any],
        function: weakref.ref[types.FunctionType] | None = None,
    ) -> None:
        super().__init__(code, captured)
        self._function = function
        self.code = code  # the function's code object, or the callable itself
        self.captured = captured  # each captured value, by name
        self.places = places  # each captured value, also of captured functions, by code and name
        self._wrapped: dict[Hashable, FunctionKey] = {}

    def wrapped(self, wrapper_key: Hashable) -> FunctionKey:
        """The key of this step in a :class:`Wrapper` with that ``wrapper_key``."""
        key = self._wrapped.get(wrapper_key)
        if key is None:
            captured = ("wrapper", wrapper_key), *self.captured
            key = self._wrapped[wrapper_key] = FunctionKey(self.code, captured, self.places, self._function)
        return key

    @property
    def is_dead(self) -> bool:
        """Whether something captured is gone, so that no function can have this key any more."""
        return any_dead(self.code) or any_dead(self.captured)

    @property
    def is_redefined(self) -> bool:
        """Whether its function is gone, and only a definition that runs again can make another, as a notebook's cell.

        The code of a function may make more: lambdas, and those that it defines.
        """
        return self._function is not None and self._function() is None and "<" not in self.code.co_qualname


class Wrapper:
    """A callable that makes another step of a function: the same one if ``wrapper_key`` and function are equal."""

    argument: str | None = None  # the name of its only argument; ``None`` if its arguments are those of the function

    def __init__(self, fn: Callable[..., Any], *distinction: Hashable) -> None:
        self.fn = fn
        self.wrapper_key = (type(self), *distinction)  # also tells it from other wrappers of the function
        self.__name__ = function_name(fn)


# A function that lives on and captures the same objects as last time keeps its key, however much it captures.
_keys: weakref.WeakKeyDictionary[types.FunctionType, tuple[list[_Seen], FunctionKey]] = weakref.WeakKeyDictionary()


def function_key(fn: Callable[..., Any]) -> FunctionKey:
    """The key of ``fn``: a function, a method, a ``functools.partial`` or a wrapper of one, or any callable object."""
    if isinstance(fn, types.FunctionType):
        entry = _keys.get(fn)
        if entry is not None and _are_current(entry[0]):
            return entry[1]
    if isinstance(fn, Wrapper):
        return function_key(fn.fn).wrapped(fn.wrapper_key)
    return _new_key(fn)


def module_of(step: Any) -> dict[str, Any]:
    """The globals of the module of a step."""
    while isinstance(step, Wrapper | functools.partial):
        step = step.fn if isinstance(step, Wrapper) else step.func
    of_class: dict[str, Any] = getattr(type(step).__call__, "__globals__", {})
    return getattr(step, "__globals__", of_class)


def captured_by(step: Any) -> list[CapturedVariable]:
    """What a step captures, and the functions that it captures, in cells and as globals of its module."""
    while isinstance(step, Wrapper):
        step = step.fn
    known = _keys.get(step) if isinstance(step, types.FunctionType) else None
    found = []
    for reference, _, seen in _Collector(step).sources if known is None else known[0]:
        fn: Any = reference()
        for at, _, _ in seen if fn is not None else ():
            owner = fn.__globals__ if isinstance(at, str) else fn.__closure__[at]
            name = at if isinstance(at, str) else fn.__code__.co_freevars[at]
            found.append(CapturedVariable(owner, name, is_watched=False))
    return found


def key_after_tracing(fn: Callable[..., Any], before: FunctionKey) -> FunctionKey:
    """The key under which to file the program of ``fn``, whose key was ``before`` until it was traced.

    A step may change what it captures while it is traced: append to a list, count its calls. That is an output, not an
    input, so the keys of later calls leave it out: a captured value, or a single item of a dict. The new key takes over
    from ``before`` what the step has read of objects.
    """
    after = _new_key(fn)
    changed = [place for place, now in after.places.items() if before.places.get(place, now) != now]
    for place in changed:
        was, now = before.places[place], after.places[place]
        are_dicts = all(isinstance(x, tuple) and x[0] is dict for x in (was, now))
        keys = {key for key, _ in {*was[1]} ^ {*now[1]}} if are_dicts else set()
        _changed_by_tracing.setdefault(place, set()).update(keys)
    after = _new_key(fn) if changed else after
    with_reads = {id(key.value): key for key in object_keys_in(before.captured) if key.reads}
    for now in object_keys_in(after.captured):
        if (was := with_reads.get(id(now.value))) is not None:
            now.reads, was.reads = was.reads, {}
    return after


_changed_by_tracing: dict[tuple[types.CodeType, str], set[Any]] = {}
"""The places of captured values that steps change while they are traced, with the keys of items if these are dicts."""


def _new_key(fn: Callable[..., Any]) -> FunctionKey:
    if isinstance(fn, Wrapper):
        return _new_key(fn.fn).wrapped(fn.wrapper_key)
    collector = _Collector(fn)
    function = collector.sources[0][0] if isinstance(collector.code, types.CodeType) else None
    key = FunctionKey(collector.code, tuple(collector.frozen), collector.places, function)
    if isinstance(fn, types.FunctionType):
        _keys[fn] = collector.sources, key
    return key


_Definition = tuple[types.CodeType, tuple[Any, ...] | None, dict[str, Any] | None]
_Seen = tuple[weakref.ref[types.FunctionType], _Definition, list[tuple[str | int, _jax.ById, tuple[Contents, ...]]]]
"""A function, which may capture itself; its code and defaults, which editors exchange when they reload it; and what it
captures: the name of a global or the index of a cell, with its value and the containers in that."""


def _captured(fn: types.FunctionType, place: str | int) -> Any:
    """The value of a global, or in a cell; ``None`` if it is not assigned yet."""
    if isinstance(place, str):
        return fn.__globals__.get(place)
    try:
        return (fn.__closure__ or ())[place].cell_contents
    except ValueError:
        return None


def _are_current(functions: list[_Seen]) -> bool:
    """Return whether each place still has the same object, with the same contents if it is a container.

    Part of every call of a step, mostly right after a program that has emptied the processor's caches, where each
    Python function that is entered costs a microsecond: so only containers are asked.
    """
    for reference, (code, defaults, keywords), captured in functions:
        fn = reference()
        if fn is None or fn.__code__ is not code:
            return False
        if fn.__defaults__ is not defaults or fn.__kwdefaults__ is not keywords:
            return False
        for place, seen, contents in captured:
            if type(place) is str:
                now = fn.__globals__.get(place)
            else:
                try:
                    now = (fn.__closure__ or ())[place].cell_contents  # type: ignore[index]
                except ValueError:
                    now = None
            if (seen._strong if seen._ref is None else seen._ref()) is not now or (now is None and seen._ref):
                return False  # for None: the object may be gone
            if contents and not are_unchanged(contents):
                return False
    return True


class _Collector(IdentityKeys):
    """Goes through everything that a function captures."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.sources: list[_Seen] = []
        self.frozen: list[tuple[str, Any]] = []
        self.places: dict[tuple[types.CodeType, str], Any] = {}
        self._visited: dict[int, int] = {}
        self._module: Any = None
        self._is_captured = False  # and not an argument that the step has already
        self.code = self._function(fn, self.frozen)

    def _function(self, fn: Any, frozen: list[tuple[str, Any]]) -> Any:
        """Add what ``fn`` captures to ``frozen``; return its code object, or the key of the callable."""
        self._visited[id(fn)] = len(self._visited)
        if isinstance(fn, functools.partial):
            code = self._function(fn.func, frozen)
            frozen += [(f"args[{i}]", self.of(value)) for i, value in enumerate(fn.args)]
            frozen += [(name, self.of(value)) for name, value in fn.keywords.items()]
            return code
        if isinstance(fn, types.MethodType):
            code = self._function(fn.__func__, frozen)
            frozen.append(("self", self.of(fn.__self__)))
            return code
        if not isinstance(fn, types.FunctionType):
            frozen.append(("self", self.of(fn)))
            return _jax.ById(fn)
        # Libraries don't change under a program: only globals of the step's own module are looked at.
        self._module = fn.__globals__ if self._module is None else self._module
        places: list[tuple[str, str | int]] = [(name, i) for i, name in enumerate(fn.__code__.co_freevars)]
        if fn.__globals__ is self._module:
            places += [(name, name) for name in global_names(fn.__code__) if name in self._module]
        captured = [(name, at, _captured(fn, at)) for name, at in places]
        captured = [c for c in captured if not isinstance(c[2], types.ModuleType)]
        seen = [(at, _jax.ById(value), Contents.of_all_in(value)) for _, at, value in captured]
        self.sources.append((weakref.ref(fn), (fn.__code__, fn.__defaults__, fn.__kwdefaults__), seen))
        was_captured, self._is_captured = self._is_captured, True
        for name, _, value in captured:
            place = fn.__code__, name
            changed = _changed_by_tracing.get(place)
            if changed and type(value) is dict:
                value, changed = {key: item for key, item in value.items() if self.of(key) not in changed}, None
            if changed is None:
                self.places[place] = self.of(value)
                frozen.append((name, self.places[place]))
            elif type(value) not in _jax.BY_VALUE:
                frozen.append((name, _jax.ById(value)))
        frozen += [(name, self.of(value)) for name, value in default_arguments(fn)]
        self._is_captured = was_captured
        return fn.__code__

    def of_other(self, value: Any) -> Any:
        if isinstance(value, ByKey):
            return value.key
        cls: Any = type(value)
        is_fixed = not may_change(cls) or isinstance(value, _jax.CONTAINERS)
        return super().of_other(value) if self._is_captured or is_fixed else ObjectKey(value)

    def of_function(self, fn: Any) -> Any:
        if id(fn) in self._visited:
            return "the same as", self._visited[id(fn)]
        nested: list[tuple[str, Any]] = []
        return self._function(fn, nested), tuple(nested)


def any_dead(value: Any) -> bool:
    """Return whether something that a key of tuples knows by identity is gone."""
    if isinstance(value, _jax.ById):
        return value.is_dead
    return isinstance(value, tuple) and any(map(any_dead, value))
