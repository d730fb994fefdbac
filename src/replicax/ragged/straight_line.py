"""Straight lines: a captured program as one list of operations on numbered values, without calls and marks.

Only loops and branches still have programs inside: the operations of a jitted helper replace its call, so that its
collectives are the step's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax import _jax
from replicax._jax.primitive_families import CALLS, SHARD_MAPS
from replicax.execution.program.collective_operations import is_collective, ragged_part_p
from replicax.execution.program.infer import infer_equation
from replicax.execution.program.inlining import Inlining, needed
from replicax.execution.program.marks import Obligation
from replicax.execution.program.program import Program
from replicax.execution.tracing.arguments import CantJoinError
from replicax.locality import Locality, M, T
from replicax.ragged.value_numbering import ValueNumbering, acts


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StraightOperation:
    """One operation of a straight program, on values that are given by their numbers."""

    equation: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]
    is_collective: bool
    """Whether it is a collective of the replicas, or a loop or branch with one inside."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """A question about the locality of the value with a number."""

    equation: Any
    obligation: Obligation
    value: int
    found: Locality
    """The value's locality, as far as one size can tell."""


class Straight(Inlining[int]):
    """A program, taken apart.

    Raises:
      LocalityError: what a mark asks for does not hold, whatever the size.
      DeadlockError: replicas may disagree on whether a collective runs.
      CantJoinError: the program has mutable arrays, or comes to only some of the gradients of an ``all_gather``.
    """

    def __init__(
        self,
        program: Program,  # the captured program
        inputs: Sequence[int],  # the numbers of its inputs
        numbers: ValueNumbering,  # of the values of this and other programs
        replica: int,  # one of the replicas that run it
        others: Sequence[StraightOperation],  # the collectives of a program of replicas with rows
    ) -> None:
        self.marks: list[Mark] = []  # what is asked of its values
        self._obligations = program.obligations
        self._numbers = numbers
        self._localities = dict(zip(inputs, program.input_localities, strict=True))
        self._operations: list[StraightOperation] = []
        self.made: dict[int, StraightOperation] = {}  # makes each value, even if nothing depends on it
        self._collectives = 0
        self._replica, self._others = replica, others
        self._added: list[int] = []
        self.outputs = self.inline(program.jaxpr, inputs)  # their numbers
        self._catch_up()
        own = [o.equation.params["number"] for o in self._operations if o.equation.primitive is ragged_part_p]
        if any(own.count(number) > self._added.count(number) for number in self._added):
            raise CantJoinError("replicas without rows come to only some of the gradients of an all_gather")
        # In an order in which they can run: those that something depends on, collectives, and those that act outside.
        self.operations = needed(self._operations, self.outputs, lambda o: o.is_collective or acts(o.equation))

    @property
    def collectives(self) -> list[StraightOperation]:
        """The collectives, in their order."""
        return [o for o in self.operations if o.is_collective]

    def literal(self, literal: _jax.Literal) -> int:
        return self._numbers.of_literal(literal)

    def constant(self, variable: Any, array: Any) -> int:
        return self._numbers.of_constant(array)

    def is_inlined(self, call: _jax.Equation, called: _jax.Jaxpr) -> bool:
        name = call.primitive.name
        return name in CALLS or (name not in SHARD_MAPS and is_collective(call))

    def refused(self, line: str) -> CantJoinError:
        return CantJoinError(f"of the mutable array (jax.new_ref) at {line}")

    def asked(self, mark: _jax.Equation, value: int) -> None:
        obligation, found = self._obligations[mark.params["mark_id"]], self._locality(value)
        if found is T:
            obligation.check(found, mark)
        self.marks.append(Mark(mark, obligation, value, found))

    def add(self, equation: _jax.Equation, operands: list[int]) -> Sequence[int]:
        if _jax.sub_jaxprs(equation) and not is_collective(equation):
            return self._add_split(equation, operands)
        return self._add(equation, operands)

    def _add_split(self, equation: Any, operands: list[int]) -> Sequence[int]:
        """Add a loop or branch, in two parts: the results on which replicas agree, and the others, with all actions.

        So the first part is the same for all sizes, even if the second is not.
        """
        differ = [locality is T for locality in self._infer(equation, operands)]
        quiet = _silenced(equation)
        if all(differ) or acts(quiet):
            return self._add(equation, operands)
        numbers = self._add_part(_jax.pruned(quiet, [not d for d in differ], thoroughly=True), equation, operands)
        if acts(equation):
            numbers = dict(zip(equation.outvars, self._add(equation, operands), strict=True)) | numbers
        elif any(differ):
            numbers = self._add_part(_jax.pruned(equation, differ), equation, operands) | numbers
        return [numbers[v] for v in equation.outvars]

    def _add_part(self, part: Any, equation: Any, operands: list[int]) -> dict[Any, int]:
        """Add a part of an equation; return the numbers of its results."""
        given = {id(atom): number for atom, number in zip(equation.invars, operands, strict=True)}
        return dict(zip(part.outvars, self._add(part, [given[id(atom)] for atom in part.invars]), strict=True))

    def _add(self, equation: Any, operands: Sequence[int]) -> tuple[int, ...]:
        talks = is_collective(equation)
        if talks:
            self._catch_up(equation)
            avals = [v.aval for v in equation.outvars]
            key = "collective", self._collectives, tuple((a.shape, a.dtype) for a in avals)
            results = self._numbers.of(key, avals)
            self._collectives += 1
        else:
            results = self._numbers.of_results(equation, operands)
            if results and self.made.keys() >= set(results):
                return results  # the same has been computed before
        localities = self._infer(equation, operands)
        self._localities.update(zip(results, localities, strict=True))
        operation = StraightOperation(equation, tuple(operands), results, talks)
        self.made.update(dict.fromkeys(results, operation))
        self._operations.append(operation)
        return results

    def _catch_up(self, equation: Any = None) -> None:
        """Add the gradients of ``all_gather`` that replicas with rows come to before ``equation``, and this one lacks.

        JAX drops the derivatives of some operations whose results have no elements, such as ``jnp.where``. To the sum
        of the gathered array's gradients a replica without rows adds zeros then, and its own part has no elements.
        """
        while self._collectives < len(self._others):
            other = self._others[self._collectives].equation
            if other.primitive is not ragged_part_p or other.params["sizes"][self._replica]:
                return
            number = other.params["number"]
            if equation and equation.primitive is ragged_part_p and equation.params["number"] == number:
                return
            self._added.append(number)
            part = jax.make_jaxpr(
                lambda e=other: ragged_part_p.bind(jnp.zeros_like(e.invars[0].aval), **{**e.params, "own": 0})
            )
            self.inline(part().jaxpr, ())

    def _infer(self, equation: Any, operands: Sequence[int]) -> list[Locality]:
        return infer_equation(equation, [self._locality(v) for v in operands], self._obligations)

    def _locality(self, number: int) -> Locality:
        return self._localities.get(number, M)  # of a literal or constant


def _silenced(equation: _jax.Equation) -> _jax.Equation:
    """``equation`` without the prints and callbacks inside that have no results."""

    def of_program(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
        kept = [_silenced(e) for e in jaxpr.eqns if e.outvars or not _jax.has_outer_effects(e)]
        return _jax.program_of(jaxpr, jaxpr.invars, kept, jaxpr.outvars)

    effects = frozenset(e for e in equation.effects if not _jax.is_outer_action(e))
    quiet = equation.replace(params=_jax.map_jaxprs(equation.params, of_program), effects=effects)
    return equation if any(_jax.has_side_effects(e) for j in _jax.sub_jaxprs(quiet) for e in j.eqns) else quiet
