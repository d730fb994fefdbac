"""Functions of libraries, computed at once where a step runs operation by operation.

A step runs operation by operation so that ``print`` and ``breakpoint()`` in it see values. A library's function has
neither, and its parts are known, so one program computes it.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from replicax._jax.internals import config as _config, core as _core, jaxlib as _jaxlib
from replicax._jax.jaxprs.keys import Keys, is_record
from replicax._jax.jaxprs.types import shape_of
from replicax._jax.traces import of_no_generation

_MOST = 16  # programs of one function that are kept


_programs: weakref.WeakKeyDictionary[Callable[..., Any], dict[Any, tuple[Any, Any] | None]]
_programs = weakref.WeakKeyDictionary()


def run_as_one(compute: Callable[..., Any], fn: Callable[..., Any], of: Callable[..., Any], args: Any) -> Any:
    """``fn(*args)``, as one program where that can be.

    Args:
      compute: gives the results of a program; ``None`` if it can't.
      fn: takes and returns pytrees of arrays.
      of: the library's function that it calls: if :func:`identity_of` knows it, ``fn`` may be one program.
      args: of ``fn``.
    """
    identity = None if _is_watched() else identity_of(of)
    leaves, tree = jax.tree_util.tree_flatten(args)
    if identity is None or not all(type(leaf) is _jaxlib.ArrayImpl for leaf in leaves):
        return fn(*args)
    with of_no_generation():
        with jax.disable_jit(False), jax.default_device(None), _core.set_current_trace(_core.eval_trace):
            programs = _programs.setdefault(fn, {})
            key = identity, tree, _config.trace_context(), *(leaf.aval for leaf in leaves)
            if key not in programs:
                programs[key] = _traced_program(fn, tree, leaves)
                while len(programs) > _MOST:
                    del programs[next(iter(programs))]
            program = programs[key]
        results = None if program is None else compute(program[0], leaves)
    if program is None or results is None:
        return fn(*args)
    return jax.tree_util.tree_unflatten(program[1], results)


def _traced_program(fn: Callable[..., Any], tree: Any, leaves: list[Any]) -> tuple[Any, Any] | None:
    def flat(*leaves: Any) -> Any:
        return fn(*jax.tree_util.tree_unflatten(tree, leaves))

    try:
        program, results = jax.make_jaxpr(flat, return_shape=True)(*map(shape_of, leaves))
    except Exception:  # it asks for values, or something is wrong, which is raised again
        return None
    are_cut = any(a.dtype != leaf.dtype for a, leaf in zip(program.in_avals, leaves, strict=True))  # to 32 bits
    return None if program.consts or program.effects or are_cut else (program, jax.tree_util.tree_structure(results))


def _is_watched() -> bool:
    """Whether a debugger follows this thread line by line, and might step into a library."""
    tracer: Any = sys.gettrace()
    if tracer is None:
        monitoring = getattr(sys, "monitoring", None)
        return monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None
    return type(getattr(tracer, "__self__", tracer)).__module__.partition(".")[0] != "coverage"


# --- what a function is made of -------------------------------------------------------------------------

_LIBRARIES = frozenset({"optax", "jax", "chex"})
_CLASSES = _LIBRARIES | {"builtins", "numpy", "ml_dtypes", "collections", "functools"}


class _UnknownError(Exception):
    pass


def identity_of(fn: Callable[..., Any]) -> Hashable | None:
    """A key that is equal for functions that compute the same; ``None`` if a part is the user's, or has no key.

    A function is its code with everything that it has captured: numbers, containers and other functions. Code of
    users, such as a schedule or a mask, may print or stop in a debugger. Globals of a library's module are the
    library's.

    >>> import jax, optax
    >>> identity_of(optax.adam(0.1).update) == identity_of(optax.adam(0.1).update) != identity_of(
    ...     optax.adam(0.2).update
    ... )
    True
    >>> identity_of(optax.adam(lambda count: 0.1).update) is None
    True
    """
    try:
        return _LibraryKeys().of(fn)
    except _UnknownError:
        return None


class _LibraryKeys(Keys):
    """Raises :class:`_UnknownError` where it meets anything that is not a library's."""

    def of(self, value: Any) -> Any:
        if is_record(value) and _root(type(value).__module__) not in _CLASSES:
            raise _UnknownError
        return super().of(value)

    def of_function(self, fn: Any) -> Any:
        if isinstance(fn, types.FunctionType) and _root(fn.__globals__.get("__name__")) not in _LIBRARIES:
            raise _UnknownError
        return super().of_function(fn)

    def of_other(self, value: Any) -> Any:
        kind: Any = type(value)
        if isinstance(value, np.dtype):
            return value
        if isinstance(value, np.generic):
            return kind, value.tobytes()
        if isinstance(value, tuple) and _root(kind.__module__) in _CLASSES:
            return kind, tuple(map(self.of, value))
        raise _UnknownError


def _root(module: str | None) -> str:
    return (module or "").partition(".")[0]
