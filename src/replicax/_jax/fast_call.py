"""Compiled programs, called without what ``jax.jit`` looks up and checks at every call.

For each array that ``jax.jit`` is given it makes a description, by which it finds the compiled program. With many
variables that is a good part of a small step. A program that is given back what it has returned itself needs none.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.interpreters import pxla as _pxla
from jaxlib import _jax as _jaxlib

_Array = _jaxlib.ArrayImpl
_Handler = _jaxlib.ResultHandler

to_arrays: Callable[[Any, Any], list[Any]] = _jaxlib.ExecuteResults.consume_with_handlers
"""The arrays of what :attr:`FastCall.execute` returns, given :attr:`FastCall.handlers`."""


class FastCall:
    """A compiled program, to be called as ``to_arrays(execute(arrays), handlers)``.

    The arrays must be as they were in the call that it was made for: each of that shape, dtype and layout, on those
    devices, and not deleted. Nobody checks that, and others may end the process.

    Both functions are JAX's own, without any Python in them.

    Attributes:
      execute: launches it; takes the flat list of arrays.
      handlers: make arrays of its results.
    """

    __slots__ = ("_others", "_state", "execute", "handlers")

    def __init__(self, run: Any, state: list[Any], others: list[Any]) -> None:
        self.execute: Callable[[Sequence[Any]], Any] = run.xla_executable.execute_sharded
        self.handlers: Sequence[Any] = run.out_handler.handlers
        self._state = state
        self._others = others

    def returns(self, arrays: Sequence[Any]) -> bool:
        """Whether the first of ``arrays``, which it has returned, are what it takes first."""
        return list(map(_kind, arrays[: len(self._state)])) == self._state

    def takes(self, others: Sequence[Any]) -> bool:
        """Whether ``others`` are what it takes after that."""
        return all(map(operator.eq, map(_kind, others), self._others))


def fast_call(jitted: Any, args: Sequence[Sequence[Any]]) -> FastCall | None:
    """The program that ``jitted(*args)`` runs, which has been called like that before; ``None`` if it needs more care.

    Args:
      jitted: what ``jax.jit`` has made.
      args: lists of arrays; the first is replaced by the results of each call, and the others stay about the same.
    """
    state, *rest = args
    others = [array for group in rest for array in group]
    kinds = list(map(_kind, state)), list(map(_kind, others))
    if None in kinds[0] or None in kinds[1]:
        return None
    executable = jitted.lower(*args).compile()._executable  # which has been compiled, and is found again
    run = executable.unsafe_call
    if (
        type(run) is not _pxla.ExecuteReplicated
        or run.ordered_effects
        or run.has_unordered_effects
        or run.has_host_callbacks
        or run.mut is not None
        or run.pgle_profiler is not None
        or len(run.kept_var_idx) != len(state) + len(others)
        or len(executable.in_avals) != len(state) + len(others)
        or not all(type(handler) is _Handler for handler in run.out_handler.handlers)
        or any(_is_extended(aval) for aval in (*executable.in_avals, *executable.out_avals))
    ):
        return None
    return FastCall(run, *kinds)


def _kind(array: Any) -> Any:
    """What of an array decides which compiled program takes it; ``None`` of anything else."""
    if type(array) is not _Array or array.is_deleted():  # of a deleted one JAX 0.10 must not be asked for the layout
        return None
    try:
        layout = array._pjrt_layout
    except jax.errors.JaxRuntimeError:  # there are devices that can't tell
        return None
    return array.shape, array.dtype, array.sharding, layout


def _is_extended(aval: Any) -> bool:
    return bool(jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended))
