"""Loop sums: sums over the replicas that a loop scatters in each iteration, instead of once at its end.

A loop over the layers of a model stacks their gradients; of each slice the sum is taken at once. A loop over the
replicas of a device adds up the gradients of each; of each term the sum over the devices is taken at once. In both, the
whole need not be in memory: the loop stacks or carries pieces.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from replicax import _jax
from replicax._jax.primitive_families import ADDITIONS, CASTS, ELEMENTWISE
from replicax.collectives import PACK_LIMIT, all_reduce_p
from replicax.execution.compiled.pieces import Piece, summed_over_groups, without_dims
from replicax.execution.compiled.wanted_pieces import may_scatter, says_nothing_new
from replicax.execution.program.marks import mark_p, replica_number_p
from replicax.variables.layout import Split


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class WantedSum:
    """A value of which nothing but pieces of its sum over the replicas is needed."""

    split: Split  # which pieces
    # The operations, each of one value and element by element, that are between the value and the sum.
    before: tuple[Any, ...] = ()
    # Whether to sum over the replicas of each group only, as the sum over the groups comes later.
    in_group: bool = False


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class LoopSum:
    """The plan of a loop's sum over the replicas, iteration by iteration."""

    of_iteration: Split  # which pieces of an iteration's result are needed
    split: Split  # which pieces of the stack of all slices, or of the total, these make up
    adds: bool  # whether it is a total to which the iterations add
    # Whether the iterations sum in each group only, so that the groups come together once, after the loop.
    in_group: bool
    # Operations on an iteration's result, before it is summed. So a gradient that is cast to a wider dtype is summed in
    # that one.
    first: tuple[Any, ...] = ()
    last: tuple[Any, ...] = ()  # operations on the pieces, after the loop

    def summand(self, array: Any) -> Any:
        """The term to be summed, from an iteration's result."""
        return _after(self.first, array)

    def result(self, array: Any) -> Piece:
        """The pieces of the wanted sum, from those that the loop has stacked or added up."""
        total = summed_over_groups(array, self.split) if self.adds else array
        return Piece(_after(self.last, total), self.split, summed=True)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class LoopPlan:
    """The plan of a loop that computes in pieces."""

    body: _jax.Jaxpr  # the program of one iteration. For a total to which the iterations add, its result is the term.
    sums: list[LoopSum | None]  # for each of its results how it is summed; ``None`` if it is not
    # Which of its inputs is the replica's number; ``None`` if it is no loop over replicas that share a device.
    number: int | None
    shared: list[bool]  # for each of the loop's constants whether it is gathered in each iteration, if it is in pieces

    def wanted(self) -> dict[Any, WantedSum]:
        """The values in an iteration of which only pieces of sums are needed. Slices are summed after it."""
        results = zip(self.body.outvars, self.sums, strict=True)
        return {v: WantedSum(s.of_iteration, in_group=True) for v, s in results if s is not None and s.adds}


def loop_plan(equation: _jax.Equation, loop: _jax.Scan, sunk: Mapping[Any, WantedSum]) -> LoopPlan:
    """The plan of a loop that computes in pieces.

    A loop over the replicas of a device gathers large values in each iteration, or the device would have all of the
    model; small ones it gathers once, and sums once. Another loop gathers once what its iterations share, as it may
    have many.

    Of the values in ``sunk`` only pieces of sums are needed.
    """
    totals = [sunk.get(v) for v in equation.outvars]
    sums: list[LoopSum | None] = [None] * loop.carried
    for total in totals[loop.carried :]:
        if total is None or total.split.dim == 0:
            sums.append(None)
        else:
            of_slice = without_dims(total.split, [0])
            sums.append(LoopSum(of_slice, total.split, False, total.in_group, first=total.before))
    marks = [e for e in loop.body.eqns if e.primitive is replica_number_p]
    if not marks:
        return LoopPlan(loop.body, sums, None, [False] * loop.constants)
    inputs: list[Any] = loop.body.invars
    uses, makers = uses_in(loop.body), {v: e for e in loop.body.eqns for v in e.outvars}
    outputs: list[Any] = list(loop.body.outvars)
    for i, (before, total) in enumerate(zip(inputs[loop.constants :], totals[: loop.carried], strict=False)):
        if total is None or is_small(before) or any(e.primitive.name not in CASTS for e in total.before):
            continue
        maker = makers.get(outputs[i])
        terms = [] if maker is None else [v for v in maker.invars if v is not before]
        adds = maker is not None and maker.primitive.name in ADDITIONS and len(terms) == 1
        if adds and uses[before] == uses[outputs[i]] == 1:
            sums[i], outputs[i] = LoopSum(total.split, total.split, True, True, last=total.before), terms[0]
    replaced = {v for v, now in zip(loop.body.outvars, outputs, strict=True) if v is not now}
    equations = [e for e in loop.body.eqns if replaced.isdisjoint(e.outvars)]
    body = _jax.replace_inputs(loop.body, inputs, equations, outputs)
    shared = [not is_small(v) for v in equation.invars[: loop.constants]]
    return LoopPlan(body, sums, inputs.index(marks[0].invars[0]), shared)


def is_small(atom: Any) -> bool:
    """Whether a value is so small that it is not worth a collective in each iteration of a loop."""
    return bool(atom.aval.size * atom.aval.dtype.itemsize <= PACK_LIMIT)


def wanted_sums(
    jaxpr: _jax.Jaxpr, hints: Mapping[Any, Split], results: Mapping[Any, WantedSum] | None
) -> dict[Any, WantedSum]:
    """The values of a program of which nothing but pieces of their sums over the replicas is needed.

    ``hints`` names values of which only pieces are needed, ``results`` the results of which only pieces of sums are.
    """
    uses = uses_in(jaxpr)
    sunk = {v: total for v, total in (results or {}).items() if not isinstance(v, _jax.Literal) and uses[v] == 1}
    for equation in reversed(jaxpr.eqns):
        totals: list[WantedSum | None]
        if equation.primitive is all_reduce_p and may_scatter(equation):
            totals = [WantedSum(hints[v]) if v in hints else None for v in equation.outvars]
        elif equation.primitive is mark_p or any(
            v in sunk and says_nothing_new(equation, sunk[v].split) for v in equation.outvars
        ):
            totals = [sunk.get(v) for v in equation.outvars]
        elif _is_of_one_value(equation) and (later := sunk.get(equation.outvars[0])) is not None:
            totals = [WantedSum(later.split, (equation, *later.before), later.in_group)] * len(equation.invars)
        else:
            continue
        for v, total in zip(equation.invars, totals, strict=True):
            if total is not None and not isinstance(v, _jax.Literal) and uses[v] == 1:
                sunk[v] = total
    return sunk


def _after(equations: Sequence[Any], array: Any) -> Any:
    """``array`` after operations of one value each."""
    for equation in equations:
        operands = [v.val if isinstance(v, _jax.Literal) else array for v in equation.invars]
        [array] = _jax.bind(equation, operands)
    return array


def _is_of_one_value(equation: Any) -> bool:
    """Whether an operation computes each element from the one in its place of a single value, and from numbers."""
    values = _jax.without_literals(equation.invars)
    return (
        equation.primitive.name in ELEMENTWISE
        and len(values) == 1
        and values[0].aval.shape == equation.outvars[0].aval.shape
    )


def uses_in(jaxpr: _jax.Jaxpr) -> collections.Counter[Any]:
    """The number of uses of each value; a result of the program has one more."""
    return collections.Counter(_jax.without_literals([*(v for e in jaxpr.eqns for v in e.invars), *jaxpr.outvars]))
