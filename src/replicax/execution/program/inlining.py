"""Inlining: a program as one list of operations, in the order in which they run.

The operations of a jitted helper replace its call. One that goes operand by operand becomes one for each operand. Marks
are gone, and mutable arrays are refused. Subclasses define the values of the list, and which calls are inlined.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from replicax import _jax
from replicax.execution.program.collective_operations import ONE_BY_ONE
from replicax.execution.program.marks import mark_p

Value = TypeVar("Value")
Operation = TypeVar("Operation", bound=Any)  # it has ``operands`` and ``results``


class Inlining(abc.ABC, Generic[Value]):
    """Goes through a program, and through called programs in place of their calls."""

    one_by_one: frozenset[str] = ONE_BY_ONE
    """Primitives each of whose results belongs to the operand in its place."""

    # --- what a subclass defines --------------------------------------------------------------------------

    @abc.abstractmethod
    def literal(self, literal: _jax.Literal) -> Value:
        """The value of a literal in the program."""

    @abc.abstractmethod
    def constant(self, variable: Any, array: Any) -> Value:
        """The value of an array that a called program has closed over, as its ``variable``."""

    @abc.abstractmethod
    def is_inlined(self, call: _jax.Equation, called: _jax.Jaxpr) -> bool:
        """Return whether a called program replaces its call."""

    @abc.abstractmethod
    def add(self, equation: _jax.Equation, operands: list[Value]) -> Sequence[Value]:
        """Append an operation; return its results."""

    @abc.abstractmethod
    def refused(self, line: str) -> Exception:
        """The error that a mutable array is used at a line of the user's."""

    def asked(self, mark: _jax.Equation, value: Value) -> None:
        """Note a mark on a value."""

    # --- programs -----------------------------------------------------------------------------------------

    def inline(self, jaxpr: _jax.Jaxpr, values: Sequence[Value]) -> list[Value]:
        """Append the operations of ``jaxpr``, applied to ``values``; return its results."""
        return _jax.interpret(jaxpr, values, self._equation, self.literal)

    def _equation(self, equation: _jax.Equation, operands: list[Value]) -> Sequence[Value]:
        if equation.primitive is mark_p:
            self.asked(equation, operands[0])
            return operands
        if any(map(_jax.is_mutable, [*equation.invars, *equation.outvars])):
            raise self.refused(_jax.source_line(equation))
        if equation.primitive.name in self.one_by_one and len(operands) > 1:
            return self.add_each(equation, operands)
        called = _jax.called_program(equation)
        if called is None or not self.is_inlined(equation, called):
            return self.add(equation, operands)
        closed = map(self.constant, called.constvars, _jax.closed_over(equation, called))
        inner = [_jax.located(e, [equation]) for e in called.eqns]
        return self.inline(_jax.opened(called.replace(eqns=inner)), [*closed, *operands])

    def add_each(self, equation: _jax.Equation, operands: list[Value]) -> Sequence[Value]:
        """Append an operation for each operand of one that goes operand by operand; return their results."""
        atoms = zip(operands, equation.invars, equation.outvars, strict=True)
        return [self.add(equation.replace(invars=[v], outvars=[r]), [value])[0] for value, v, r in atoms]


def needed(
    operations: Sequence[Operation], outputs: Iterable[Any], stays: Callable[[Operation], bool]
) -> list[Operation]:
    """The operations on which one of the ``outputs`` depends, and those that always stay."""
    used = set(outputs)
    kept = []
    for operation in reversed(operations):
        if stays(operation) or not used.isdisjoint(operation.results):
            kept.append(operation)
            used.update(operation.operands)
    return kept[::-1]
