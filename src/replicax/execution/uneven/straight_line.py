"""Straight lines: a captured program as one list of operations on numbered values, without calls and marks.

Besides the programs of loops and branches nothing is inside anything: what a jitted helper does stands in the place of
its call, so that its collectives are the step's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from replicax import _jax
from replicax._jax.primitive_families import CALLS
from replicax.execution.program.infer import ONE_BY_ONE, called_program, infer_equation, is_collective
from replicax.execution.program.marks import Obligation, mark_p
from replicax.execution.program.program import Program
from replicax.execution.uneven.value_numbering import ValueNumbering, acts
from replicax.locality import Locality, M, T


class CantJoinError(ValueError):
    """The programs that replicas of different sizes run can't be one; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StraightOperation:
    """One operation of a straight program.

    Attributes:
      equation: what it does.
      operands: the numbers of its operands.
      results: and of its results.
      is_collective: whether it is a collective of the replicas, or a loop or branch with one inside.
    """

    equation: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]
    is_collective: bool


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """A question about the locality of a value.

    Attributes:
      equation: where it is asked.
      obligation: what must hold.
      value: the number of the value.
      found: the value's locality, as far as one size can tell.
    """

    equation: Any
    obligation: Obligation
    value: int
    found: Locality


class Straight:
    """A program, taken apart.

    Args:
      program: the captured program.
      inputs: the numbers of its inputs.
      localities: theirs.
      numbers: of the values of this and other programs.

    Attributes:
      operations: in an order in which they can run; only those that something depends on, collectives, and those that
        do something outside.
      made: the operation that makes each value, whether anything depends on it or not.
      outputs: the numbers of its outputs.
      marks: what is asked of its values.

    Raises:
      LocalityError: what a mark asks for does not hold, whatever the size.
      DeadlockError: replicas may disagree on whether a collective runs.
      CantJoinError: the program has mutable arrays.
    """

    def __init__(
        self, program: Program, inputs: Sequence[int], localities: Sequence[Locality], numbers: ValueNumbering
    ) -> None:
        self.marks: list[Mark] = []
        self._obligations = program.obligations
        self._numbers = numbers
        self._localities = dict(zip(inputs, localities, strict=True))
        self._operations: list[StraightOperation] = []
        self.made: dict[int, StraightOperation] = {}
        self._collectives = 0
        self.outputs = self._inline(program.jaxpr, inputs)
        self.operations = self._needed()

    @property
    def collectives(self) -> list[StraightOperation]:
        """The collectives, in their order."""
        return [o for o in self.operations if o.is_collective]

    def _inline(self, jaxpr: _jax.Jaxpr, operands: Sequence[int]) -> list[int]:
        env = dict(zip(jaxpr.invars, operands, strict=True))

        def read(atom: Any) -> int:
            return self._numbers.of_literal(atom) if isinstance(atom, _jax.Literal) else env[atom]

        for equation in jaxpr.eqns:
            results = self._equation(equation, [read(v) for v in equation.invars])
            env.update(zip(equation.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, equation: Any, operands: list[int]) -> Sequence[int]:
        name = equation.primitive.name
        if equation.primitive is mark_p:
            obligation = self._obligations[equation.params["mark_id"]]
            found = self._locality(operands[0])
            if found is T:
                obligation.check(found, equation)
            self.marks.append(Mark(equation, obligation, operands[0], found))
            return operands
        if any(map(_jax.is_mutable, [*equation.invars, *equation.outvars])):
            raise CantJoinError(f"of the mutable array (jax.new_ref) at {_jax.source_line(equation)}")
        if name in ONE_BY_ONE and len(operands) > 1:
            atoms = zip(operands, equation.invars, equation.outvars, strict=True)
            return [self._add(equation.replace(invars=[v], outvars=[r]), [number])[0] for number, v, r in atoms]
        called = called_program(equation)
        if called is not None and (name in CALLS or (name != "shard_map" and is_collective(equation))):
            closed = list(map(self._numbers.of_constant, _jax.constants_of(equation)))
            return self._inline(_jax.opened(called), [*closed, *operands])
        if not is_collective(equation) and _jax.sub_jaxprs(equation):
            return self._add_split(equation, operands)
        return self._add(equation, operands)

    def _add_split(self, equation: Any, operands: list[int]) -> Sequence[int]:
        """Add a loop or branch: what replicas agree on is computed without what they may differ in, or do besides.

        So it is the same for all sizes, though the whole is not.
        """
        differ = [locality is T for locality in self._infer(equation, operands)]
        quiet = _jax.silenced(equation)
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
            avals = [v.aval for v in equation.outvars]
            key = "collective", self._collectives, tuple((a.shape, a.dtype) for a in avals)
            results = self._numbers.of(key, avals)
            self._collectives += 1
        else:
            results = self._numbers.of_results(equation, operands)
            if results and self.made.keys() >= set(results):
                return results  # the same has been computed before
        found = self._infer(equation, operands)
        self._localities.update(zip(results, found, strict=True))
        operation = StraightOperation(equation, tuple(operands), results, talks)
        self.made.update(dict.fromkeys(results, operation))
        self._operations.append(operation)
        return results

    def _infer(self, equation: Any, operands: Sequence[int]) -> list[Locality]:
        return infer_equation(equation, [self._locality(v) for v in operands], self._obligations)

    def _locality(self, number: int) -> Locality:
        return self._localities.get(number, M)  # of a literal or constant

    def _needed(self) -> list[StraightOperation]:
        needed, kept = set(self.outputs), []
        for operation in reversed(self._operations):
            if operation.is_collective or acts(operation.equation) or not needed.isdisjoint(operation.results):
                kept.append(operation)
                needed.update(operation.operands)
        return kept[::-1]
