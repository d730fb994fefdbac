"""Digests: compare arrays, and what programs compute, by a few bytes of each."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _jax
from replicax.devices.arrays import local_array
from replicax.pytrees import are_equal

Digest = tuple[str, tuple[int, ...], Any]
"""The dtype's name, the shape, and a digest of the numbers (or :class:`ExactNumbers`: all of them)."""


def digest(value: Any) -> Digest:
    """A digest: equal for arrays of one dtype and shape with equal elements (NaN equals NaN), different otherwise.

    >>> digest(jnp.array([0.0, jnp.nan])) == digest(jnp.array([-0.0, jnp.nan]))
    True
    """
    name, shape, numbers = _numbers_of(value)
    if jnp.issubdtype(numbers.dtype, jnp.inexact):
        numbers = numbers + np.zeros((), numbers.dtype)  # -0 becomes 0
        is_nan = np.isnan(numbers)
        if is_nan.any():
            numbers = np.where(is_nan, np.full((), np.nan, numbers.dtype), numbers)
    return name, shape, _jax.digested(np.ascontiguousarray(numbers).tobytes())


def unabridged(value: Any) -> Digest:
    """Return an object that compares as digests do, in a fraction of the time; but it holds the array.

    >>> unabridged(jnp.array([0.0, jnp.nan])) == unabridged(jnp.array([-0.0, jnp.nan]))
    True
    """
    name, shape, numbers = _numbers_of(value)
    return name, shape, ExactNumbers(numbers)


class ExactNumbers:
    """Equal to others of the same dtype and shape if the elements are, where NaN equals NaN."""

    __slots__ = ("_numbers",)

    def __init__(self, numbers: np.ndarray[Any, Any]) -> None:
        self._numbers = numbers

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExactNumbers) and are_equal(self._numbers, other._numbers)

    __hash__ = None  # type: ignore[assignment]


def _numbers_of(value: Any) -> tuple[str, tuple[int, ...], np.ndarray[Any, Any]]:
    """The dtype's name, the shape, and the elements; those of random keys are their data."""
    value = local_array(value) if isinstance(value, jax.Array) else np.asarray(value)
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return str(value.dtype), tuple(value.shape), np.asarray(jax.random.key_data(value) if is_key else value)


# --- programs -------------------------------------------------------------------------------------------


def outputs_of(program: Any) -> list[tuple[str, bytes]]:
    """Return each output of a ``Program`` in words, and a digest of how it is computed: equal for equal programs.

    Operations count by their names, their numbers and what they are given, in whatever order they are done. What no
    output depends on does not count, such as a print on the chief only.
    """
    if program in _outputs:
        return _outputs[program]
    inputs = [f"variable {_number(use)}" for use in program.reads]
    inputs += [f"argument {i}" for i in range(len(program.jaxpr.invars) - len(inputs) - len(program.constants))]
    given = [*map(_digest_of, inputs), *(_digest_of(*digest(x)) for x in program.constants)]
    words = [f"a new value of variable number {_number(use)}, {use.name!r}" for use in program.writes]
    computed = _digests_of_outputs(program.jaxpr, given)
    words += [f"result {i}" for i in range(len(computed) - len(words))]
    return _outputs.setdefault(program, list(zip(words, computed, strict=True)))


_outputs: weakref.WeakKeyDictionary[Any, list[tuple[str, bytes]]] = weakref.WeakKeyDictionary()


def _number(use: Any) -> Any:
    variable = use.variable()
    return None if variable is None else variable.number


def _digests_of_outputs(program: Any, operands: Sequence[bytes]) -> list[bytes]:
    """A digest of each output of a jaxpr, by those of its inputs."""
    constants = [_digest_of(*digest(x)) for x in getattr(program, "consts", ())]

    def of_results(equation: _jax.Equation, operands: list[bytes]) -> list[bytes]:
        params = (part for _, value in sorted(equation.params.items()) for part in _numbers_in(value))
        kinds = [str(variable.aval) for variable in equation.outvars]
        result = _digest_of(equation.primitive, kinds, *params, *operands)
        return [_digest_of(result, i) for i in range(len(kinds))]

    def of_literal(literal: _jax.Literal) -> bytes:
        return _digest_of(str(literal.aval), np.asarray(literal.val).tobytes())

    opened = _jax.opened(getattr(program, "jaxpr", program))
    return _jax.interpret(opened, [*constants, *operands], of_results, of_literal)


def _numbers_in(param: Any) -> Iterator[Any]:
    """Numbers and enums in a parameter of an operation, and digests of programs; nothing else counts."""
    if isinstance(param, _jax.Jaxpr | _jax.ClosedJaxpr):
        jaxpr = getattr(param, "jaxpr", param)
        yield from _digests_of_outputs(param, [_digest_of(i) for i in range(len(jaxpr.invars))])
    elif isinstance(param, tuple | list):
        yield len(param)
        for item in param:
            yield from _numbers_in(item)
    elif isinstance(param, bool | int | float):
        yield param
    elif isinstance(param, enum.Enum):
        yield str(param)


def _digest_of(*parts: Any) -> bytes:
    return _jax.digested(repr(parts).encode())
