"""Entered programs: loops, branches and calls with collectives inside, which a walk goes through as well."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from replicax import _jax
from replicax.execution.compiled.local_values import Each, array_of


class Walk(abc.ABC):
    """Goes through a program, operation by operation.

    The values here are bare: those of one replica, or those that all have alike. A subclass may also have
    :class:`Each` for values in which replicas differ.
    """

    @abc.abstractmethod
    def results(self, equation: _jax.Equation, operands: list[Any]) -> list[Any]:
        """The results of one operation."""

    def differs(self, atom: Any) -> bool:
        """Whether a value of the program is to be an :class:`Each`."""
        return False

    def as_wanted(self, value: Any, atom: Any, differs: bool) -> Any:
        """A value, as an :class:`Each` or bare."""
        return value

    def go(self, equations: Sequence[_jax.Equation], env: dict[Any, Any]) -> None:
        """Compute the results of some operations."""
        for equation in equations:
            operands = [v.val if isinstance(v, _jax.Literal) else env[v] for v in equation.invars]
            env.update(zip(equation.outvars, self.results(equation, operands), strict=True))

    def run(
        self, jaxpr: _jax.Jaxpr, values: Sequence[Any], differ: Sequence[bool], constants: Sequence[Any] = ()
    ) -> list[Any]:
        """The results of a program, each an :class:`Each` or bare, as ``differ`` says."""
        return _jax.interpret(_jax.opened(jaxpr), [*constants, *values], self.results)


def enter(walk: Walk, equation: _jax.Equation, operands: list[Any]) -> list[Any]:
    """Let ``walk`` go through the program of a loop, a branch or a call; return its results."""
    inner = _jax.control_flow_of(equation)
    differ = [walk.differs(v) for v in equation.outvars]
    if isinstance(inner, _jax.Scan):
        return _scan(walk, equation, inner, operands)
    if isinstance(inner, _jax.While):
        return _while(walk, equation, inner, operands)
    if isinstance(inner, _jax.Branches):
        return _branches(walk, equation, inner, operands, differ)
    called = _jax.called_program(equation)
    if called is None:
        raise ValueError(
            f"{equation.primitive.name} at {_jax.source_line(equation)} has a collective inside, or asks there for the "
            "replica's number: with several replicas on a device do that outside of it"
        )
    return walk.run(called, operands, differ, _jax.closed_over(equation, called))


def _as_each(array: Any, like: bool) -> Any:
    return Each(array) if like else array


def _scan(walk: Walk, equation: _jax.Equation, loop: _jax.Scan, operands: list[Any]) -> list[Any]:
    n, m = loop.constants, loop.constants + loop.carried
    carried = [walk.differs(v) for v in loop.body.invars[n:m]]
    start = [walk.as_wanted(v, a, d) for v, a, d in zip(operands[n:m], equation.invars[n:m], carried, strict=True)]
    sliced = [isinstance(v, Each) for v in operands[m:]]
    stacked_differ = [walk.differs(v) for v in equation.outvars[loop.carried :]]
    constants = _jax.closed_over(equation, loop.body)

    def iteration(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        values = [*operands[:n], *map(_as_each, carry, carried), *map(_as_each, slices, sliced)]
        results = [array_of(v) for v in walk.run(loop.body, values, [*carried, *stacked_differ], constants)]
        return results[: m - n], results[m - n :]

    with _jax.from_line_of(equation):
        last, stacked = lax.scan(
            iteration,
            [array_of(v) for v in start],
            [jnp.moveaxis(v.array, 1, 0) if isinstance(v, Each) else v for v in operands[m:]],
            length=loop.length,
            reverse=loop.reverse,
            unroll=loop.unroll,
        )
    results = [Each(jnp.moveaxis(x, 0, 1)) if d else x for x, d in zip(stacked, stacked_differ, strict=True)]
    return [*map(_as_each, last, carried), *results]


def _while(walk: Walk, equation: _jax.Equation, loop: _jax.While, operands: list[Any]) -> list[Any]:
    n, m = loop.test_constants, loop.test_constants + loop.body_constants
    carried = [walk.differs(v) for v in loop.body.invars[m - n :]]
    start = [walk.as_wanted(v, a, d) for v, a, d in zip(operands[m:], equation.invars[m:], carried, strict=True)]

    def test(carry: list[Any]) -> Any:
        values = [*operands[:n], *map(_as_each, carry, carried)]
        return walk.run(loop.test, values, [False], _jax.closed_over(equation, loop.test))[0]

    def iteration(carry: list[Any]) -> list[Any]:
        values = [*operands[n:m], *map(_as_each, carry, carried)]
        return [array_of(v) for v in walk.run(loop.body, values, carried, _jax.closed_over(equation, loop.body))]

    last = lax.while_loop(test, iteration, [array_of(v) for v in start])
    return list(map(_as_each, last, carried))


def _branches(
    walk: Walk, equation: _jax.Equation, branches: _jax.Branches, operands: list[Any], differ: list[bool]
) -> list[Any]:
    def branch(program: _jax.Jaxpr) -> Callable[[], list[Any]]:
        constants = _jax.closed_over(equation, program)
        return lambda: [array_of(v) for v in walk.run(program, operands[1:], differ, constants)]

    index = walk.as_wanted(operands[0], equation.invars[0], False)
    results = lax.switch(index, [branch(program) for program in branches.programs])
    return list(map(_as_each, results, differ))
