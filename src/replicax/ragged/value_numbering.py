"""Value numbering: which values of several programs are the same computation of the same inputs.

Each value gets a number, and two get the same if they are the same result of the same operation on values of the same
numbers. This finds the common computations of several programs in any order, and among any others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from replicax import _jax
from replicax.devices.arrays import is_in_parts, local_array

_LARGE = 64 * 1024 * 1024
"""Constants of more bytes are compared by identity: to read them from a device at each trace takes too long."""


class ValueNumbering:
    """The values of several programs, by number; those of literals are known, and arrays that are closed over."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[int, ...]] = {}
        self.avals: list[Any] = []
        self.literals: dict[int, Any] = {}
        self.constants: dict[int, Any] = {}
        self._keys = _ContentKeys()

    def of(self, key: Any, avals: Sequence[Any]) -> tuple[int, ...]:
        """The numbers of the values with this key; the same for an equal key."""
        if key not in self._known:
            start = len(self.avals)
            self.avals += avals
            self._known[key] = tuple(range(start, start + len(avals)))
        return self._known[key]

    def of_literal(self, literal: Any) -> int:
        """The number of a literal."""
        [number] = self.of(("literal", _contents(literal.val)), [literal.aval])
        self.literals.setdefault(number, literal.val)
        return number

    def of_constant(self, array: Any) -> int:
        """The number of an array that a program has closed over."""
        key = self._keys.of_array(array)
        [number] = self.of(("constant", key), [jax.typeof(array)])
        self.constants.setdefault(number, array)
        return number

    def of_results(self, equation: Any, operands: Sequence[int]) -> tuple[int, ...]:
        """The numbers of an operation's results."""
        avals = [v.aval for v in equation.outvars]
        if acts(equation):
            return self.of(object(), avals)
        return self.of((*self.what(equation), tuple(operands)), avals)

    def what(self, equation: Any) -> Any:
        """The key of an operation without its operands."""
        return (
            equation.primitive,
            self._keys.of_params(equation),
            tuple(self._keys.of_aval(v.aval) for v in equation.outvars),
        )


def acts(equation: Any) -> bool:
    """Return whether an operation is more than a function of its operands."""
    return _jax.has_side_effects(equation) or not _jax.is_deterministic(equation.primitive.name, equation.params)


class _ContentKeys(_jax.Keys):
    """Parameters of operations as keys: programs by their operations, arrays by their contents."""

    def __init__(self) -> None:
        super().__init__()
        self._programs: dict[int, tuple[Any, Any]] = {}
        self._held: list[Any] = []  # so that ids stay their own

    def of_params(self, equation: Any) -> Any:
        # Rules of derivatives have done their work.
        rules = _jax.has_rules(equation)
        return tuple((k, self.of(v)) for k, v in sorted(equation.params.items()) if not (rules and _jax.is_rule(v)))

    def of_other(self, value: Any) -> Any:
        if isinstance(value, (_jax.Jaxpr, _jax.ClosedJaxpr)):
            return self.of_program(value)
        if isinstance(value, (np.ndarray, np.generic, jax.Array)):
            return self.of_array(value)
        try:
            hash(value)
        except TypeError:
            self._held.append(value)
            return "object", id(value)
        return type(value), value

    def of_array(self, array: Any) -> Any:
        if is_in_parts(array) or array.nbytes > _LARGE:
            self._held.append(array)
            return "array", id(array)
        if isinstance(array, jax.Array):
            array = local_array(array)
        if jax.numpy.issubdtype(array.dtype, jax.dtypes.extended):
            return array.dtype, _contents(jax.random.key_data(array))
        return _contents(array)

    def of_aval(self, aval: Any) -> Any:
        return (aval.shape, aval.dtype) if hasattr(aval, "shape") else aval  # a token has none

    def of_program(self, program: Any) -> Any:
        if id(program) not in self._programs:
            self._programs[id(program)] = program, super().of_program(program)
        return self._programs[id(program)][1]


def _contents(value: Any) -> Any:
    array = np.asarray(value)
    return array.dtype, array.shape, _jax.digested(array.tobytes())
