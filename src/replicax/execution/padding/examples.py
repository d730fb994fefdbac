"""Examples: where are they in each result of a program?

A dataflow pass over a captured program like :mod:`replicax.execution.program.infer`, by the rules of
:mod:`replicax.execution.padding.example_rules`. It also answers the questions that were asked while the step's Python
ran (:mod:`replicax.execution.padding.questions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from replicax import _jax
from replicax.execution.padding.example_places import PART, UNKNOWN, OperationShapes, Place, Rows, Untraceable, joined
from replicax.execution.padding.example_rules import result_places
from replicax.execution.program.infer import called_program
from replicax.execution.program.marks import asks_p


def example_places(jaxpr: _jax.Jaxpr, inputs: Sequence[Place], rows: int) -> list[Place]:
    """Where the examples are in each output of ``jaxpr``, given where they are in its inputs.

    Args:
      jaxpr: a program over one replica's values.
      inputs: one for each input.
      rows: how many examples a replica has, padding included.

    Raises:
      ValueError: a question can't be answered.

    >>> import jax
    >>> from replicax.execution.padding.example_places import Rows
    >>> program = jax.make_jaxpr(lambda x, w: ((x @ w).T, w * 2, (x @ w).sum(0)))(
    ...     jax.numpy.ones((6, 3)), jax.numpy.ones((3, 6))
    ... )
    >>> example_places(program.jaxpr, [Rows(0), None], 6)
    [Rows(dim=1, outer=1, inner=1), None, None]
    """
    return _Pass(rows).run(jaxpr, list(inputs), final=True)


class _Pass:
    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.known: dict[Any, list[Place]] = {}

    def run(self, jaxpr: Any, inputs: list[Place], *, final: bool) -> list[Place]:
        """Places of the outputs; fixpoints are searched with ``final=False``, which answers nothing."""
        key = (id(jaxpr), tuple(inputs))
        if not final and key in self.known:
            return self.known[key]
        env: dict[Any, Place] = dict.fromkeys(jaxpr.constvars)
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Place:
            return None if isinstance(atom, _jax.Literal) else env[atom]

        for equation in jaxpr.eqns:
            results = self.equation(equation, [read(v) for v in equation.invars], final)
            env.update(zip(equation.outvars, results, strict=True))
        self.known[key] = [read(v) for v in jaxpr.outvars]
        return self.known[key]

    def equation(self, equation: Any, places: list[Place], final: bool) -> list[Place]:
        name = equation.primitive.name
        if equation.primitive is asks_p and final:
            equation.params["question"].resolve(places[0], equation.invars[0].aval.shape)
        if name == "scan":
            return self.scan(equation, places, final)
        if name == "while":
            return self.while_loop(equation, places, final)
        if name == "cond":
            branches = [self.run(b, places[1:], final=final) for b in _jax.branches_of(equation.params)]
            return [joined(results) for results in zip(*branches, strict=True)]
        called = called_program(equation)
        if called is not None:
            return self.run(called, places, final=final)
        for inner in _jax.sub_jaxprs(equation):  # a question inside must have an answer
            if any(map(_is_something, places)):
                self.run(inner, [PART for _ in inner.invars], final=final)
        return result_places(
            OperationShapes(
                name,
                equation.params,
                tuple(places),
                tuple(shape_of(v) for v in equation.invars),
                tuple(shape_of(v) for v in equation.outvars),
                self.rows,
                lambda i: number(equation.invars[i]),
            )
        )

    def while_loop(self, equation: Any, places: list[Place], final: bool) -> list[Place]:
        loop = _jax.while_of(equation.params)
        body, n_test, n_consts = loop.body, loop.test_constants, loop.test_constants + loop.body_constants
        consts, carry = places[n_test:n_consts], places[n_consts:]
        while (after := _joined_each(carry, self.run(body, [*consts, *carry], final=False))) != carry:
            carry = after
        if final:
            self.run(loop.test, [*places[:n_test], *carry], final=True)
            self.run(body, [*consts, *carry], final=True)
        return carry

    def scan(self, equation: Any, places: list[Place], final: bool) -> list[Place]:
        loop = _jax.scan_of(equation.params)
        body, n_consts, n_carry = loop.body, loop.constants, loop.carried
        consts = places[:n_consts]
        carry, xs = places[n_consts : n_consts + n_carry], places[n_consts + n_carry :]
        over_examples = Rows(0) in xs  # each turn is about one of them
        sliced = [_sliced(place) for place in xs]
        while True:
            results = self.run(body, [*consts, *carry, *sliced], final=False)
            after = _joined_each(carry, results[:n_carry])
            if after == carry:
                break
            carry = after
        if final:
            self.run(body, [*consts, *carry, *sliced], final=True)
        stacked = [_stacked(place, over_examples) for place in results[n_carry:]]
        return [*carry, *stacked]


def _is_something(place: Place) -> bool:
    return isinstance(place, Rows | Untraceable)


def _joined_each(some: Sequence[Place], others: Sequence[Place]) -> list[Place]:
    return [joined(pair) for pair in zip(some, others, strict=True)]


def _sliced(place: Place) -> Place:
    """A turn's part of what a scan goes over."""
    if not isinstance(place, Rows):
        return PART if isinstance(place, Untraceable) else None
    if place.dim > 0:
        return place.moved(place.dim - 1)
    return None if place == Rows(0) else PART


def _stacked(place: Place, over_examples: bool) -> Place:
    if isinstance(place, Rows):
        return UNKNOWN if over_examples else place.moved(place.dim + 1)
    if isinstance(place, Untraceable):
        return place
    return Rows(0) if over_examples else None


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a value of a program; ``()`` if it has none."""
    return tuple(getattr(atom.aval, "shape", ()))


def number(value: Any) -> Any:
    """A number that is known: a literal of a program, or a concrete scalar."""
    value = value.val if isinstance(value, _jax.Literal) else value
    if isinstance(value, jax.core.Tracer) or not isinstance(value, jax.Array | np.ndarray | np.generic | int | float):
        return None
    return None if np.ndim(value) else np.asarray(value).item()
