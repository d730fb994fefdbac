"""Value numbering: which values of several programs are the same computation of the same inputs.

Each value gets a number, and two get the same if they are the same result of the same operation on values of the same
numbers. So what several programs have in common is found however they are written down, and whatever else they do.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from replicax import _jax
from replicax.execution.tracing.function_key import is_record

_SMALL = 64 * 1024
"""Constants of at most so many bytes are compared by value."""


class ValueNumbering:
    """The values of several programs.

    Attributes:
      avals: shape and dtype of each value, by number.
      literals: the values of those that are known.
      constants: the arrays that programs have closed over.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[int, ...]] = {}
        self.avals: list[Any] = []
        self.literals: dict[int, Any] = {}
        self.constants: dict[int, Any] = {}
        self._params = _Frozen()

    def of(self, key: Any, avals: Sequence[Any]) -> tuple[int, ...]:
        """The numbers of the values that ``key`` stands for; the same for an equal key."""
        if key not in self._known:
            start = len(self.avals)
            self.avals += avals
            self._known[key] = tuple(range(start, start + len(avals)))
        return self._known[key]

    def of_literal(self, literal: Any) -> int:
        """That of a number that stands in a program."""
        [number] = self.of(("literal", _contents(literal.val)), [literal.aval])
        self.literals.setdefault(number, literal.val)
        return number

    def of_constant(self, array: Any) -> int:
        """That of an array that a program has closed over."""
        key = self._params.array(array)
        [number] = self.of(("constant", key), [jax.typeof(array)])
        self.constants.setdefault(number, array)
        return number

    def of_results(self, equation: Any, operands: Sequence[int]) -> tuple[int, ...]:
        """Those of an operation's results."""
        avals = [v.aval for v in equation.outvars]
        if acts(equation):
            return self.of(object(), avals)
        return self.of((*self.what(equation), tuple(operands)), avals)

    def what(self, equation: Any) -> Any:
        """What an operation does, whatever it does it to."""
        return equation.primitive, self._params.of_equation(equation), tuple(_kind(v.aval) for v in equation.outvars)


def acts(equation: Any) -> bool:
    """Whether an operation is more than a function of its operands."""
    return _jax.acts_outside(equation) or not _jax.is_function(equation.primitive.name, equation.params)


class _Frozen:
    """Parameters of operations as keys: programs by what they do, arrays by what is in them."""

    def __init__(self) -> None:
        self._programs: dict[int, tuple[Any, Any]] = {}
        self._functions: dict[int, tuple[Any, Any]] = {}
        self._held: list[Any] = []  # so that ids stay their own

    def of_equation(self, equation: Any) -> Any:
        # Rules of derivatives have done their work.
        rules = _jax.has_rules(equation)
        return tuple((k, self.of(v)) for k, v in sorted(equation.params.items()) if not (rules and callable(v)))

    def of(self, value: Any) -> Any:
        if isinstance(value, _jax.ClosedJaxpr):
            return "program", self.program(value.jaxpr), tuple(map(self.array, value.consts))
        if isinstance(value, _jax.Jaxpr):
            return "program", self.program(value)
        if type(value) in (tuple, list):
            return tuple(map(self.of, value))
        if type(value) in (set, frozenset):
            return frozenset(map(self.of, value))
        if type(value) is dict:
            return tuple((k, self.of(v)) for k, v in value.items())
        if isinstance(value, (np.ndarray, np.generic, jax.Array)):
            return self.array(value)
        if isinstance(value, types.FunctionType):
            return self.function(value)
        if is_record(value):
            return type(value), tuple(self.of(getattr(value, field.name)) for field in dataclasses.fields(value))
        try:
            hash(value)
        except TypeError:
            self._held.append(value)
            return "object", id(value)
        return type(value), value

    def function(self, fn: types.FunctionType) -> Any:
        """Equal for functions with the same code that have captured the same: they are made in each capture."""
        if id(fn) not in self._functions:
            self._functions[id(fn)] = fn, id(fn)  # while it is looked at; it may have captured itself
            captured = [cell.cell_contents for cell in fn.__closure__ or () if cell != types.CellType()]
            key = fn.__code__, id(fn.__globals__), *map(self.of, (fn.__defaults__, fn.__kwdefaults__, captured))
            self._functions[id(fn)] = fn, key
        return self._functions[id(fn)][1]

    def array(self, array: Any) -> Any:
        is_small = isinstance(array, (np.ndarray, np.generic)) or (
            isinstance(array, jax.Array)
            and array.is_fully_addressable
            and not jax.numpy.issubdtype(array.dtype, jax.dtypes.extended)
        )
        if is_small and array.size * array.dtype.itemsize <= _SMALL:
            return _contents(array)
        self._held.append(array)
        return "array", id(array)

    def program(self, jaxpr: Any) -> Any:
        if id(jaxpr) not in self._programs:
            numbers: dict[Any, int] = {}

            def atom(v: Any) -> Any:
                return ("literal", _contents(v.val)) if isinstance(v, _jax.Literal) else numbers[v]

            def new(atoms: Sequence[Any]) -> Any:
                for v in atoms:
                    numbers[v] = len(numbers)
                return tuple(_kind(v.aval) for v in atoms)

            inputs = new([*jaxpr.constvars, *jaxpr.invars])
            operations = tuple(
                (e.primitive, self.of_equation(e), tuple(map(atom, e.invars)), new(e.outvars)) for e in jaxpr.eqns
            )
            key = inputs, operations, tuple(map(atom, jaxpr.outvars))
            self._programs[id(jaxpr)] = jaxpr, key
        return self._programs[id(jaxpr)][1]


def _contents(value: Any) -> Any:
    array = np.asarray(value)
    return array.dtype, array.shape, array.tobytes()


def _kind(aval: Any) -> Any:
    return (aval.shape, aval.dtype) if hasattr(aval, "shape") else str(aval)
