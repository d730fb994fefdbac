"""The pass over a captured step that finds the terms of each variable's new value."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax.numpy as jnp

from replicax import _jax
from replicax._jax.primitive_families import AXIS_POSITION, AXIS_SUMS, IDENTITIES, PRODUCTS, QUOTIENTS, REFERENCES
from replicax.checks.loss_scale.backward_rules import (
    FIRST_WEIGHT,
    backward,
    is_backward,
    leave_backward_pass,
    reduced_cotangent,
    through_share,
    times_examples_in_loop,
    without_constants,
)
from replicax.checks.loss_scale.operation_rules import ScaledOperation, common_result, own_result
from replicax.checks.loss_scale.terms import (
    NOTHING_KNOWN,
    Kind,
    Level,
    Origin,
    ScaleFact,
    Term,
    effective_kind,
    is_close,
    join_facts,
    settle,
)
from replicax.collectives import all_reduce_p, share_back_p, share_p
from replicax.execution.program.collective_operations import all_get_the_same, over_replicas, replicas_meet
from replicax.execution.program.dataflow import Control, Dataflow, Found
from replicax.execution.program.locality_rules import LOCALITY_KEPT, result_localities
from replicax.execution.program.marks import mark_p
from replicax.execution.program.program import Program
from replicax.locality import Locality, R, T
from replicax.padding.example_places import Place, Rows
from replicax.padding.example_rules import result_places
from replicax.padding.examples import (
    known_number,
    operation_shapes,
    place_of_examples,
    shape_of,
    sliced_place,
    stacked_place,
)

_OVER_REPLICAS = (
    ("pmean", "/jax/_src/lax/parallel.py"),
    ("divide", "/replicax/collectives.py"),
    ("scale_regularization_loss", "/replicax/training/losses.py"),
)
"""Functions that divide by the number of replicas, and their files."""
_OVER_ELEMENTS = ("mean", "_mean", "_var"), "/jax/_src/numpy/reductions.py"
"""Functions that divide by a number of elements, and their file."""
_MEAN_UPDATE = ("Mean.update",), "/replicax/training/metrics.py"
"""The method in which each value counts once on each replica, and its file."""


class LossScalePass(Dataflow[ScaleFact]):
    """Finds the terms of a program's values; ``is_ragged``: other replicas may have another number of examples."""

    def __init__(self, program: Program, rows: int, is_ragged: bool = False) -> None:
        super().__init__(ScaleFact(outside=True))
        self.program = program
        self.rows = rows
        self.asked = program.asked_for_count
        self.is_ragged = is_ragged
        self.wrong_means: set[Term] = set()
        """Means over the replicas, or of a metric, of what should be added up."""
        self._backward = False

    def output_facts(self) -> list[ScaleFact]:
        """The facts of the new values of the variables that the program writes, then those of the step's results."""
        return self.run(self._without_derivatives(), self._inputs(), final=True)[0]

    def _without_derivatives(self) -> _jax.Jaxpr:
        """The program without unused operations and derivatives: a marked gradient has the terms of its loss."""
        jaxpr = self.program.jaxpr
        needed = set(_jax.without_literals(jaxpr.outvars))
        kept = []
        for equation in reversed(jaxpr.eqns):
            if needed.isdisjoint(equation.outvars) and not any(map(_jax.is_mutable, equation.invars)):
                continue
            if self._is_loss(equation):
                equation = equation.replace(invars=equation.invars[:1])
            kept.append(equation)
            needed.update(_jax.without_literals(equation.invars))
        return _jax.replace_inputs(jaxpr, jaxpr.invars, kept[::-1], jaxpr.outvars)

    def _inputs(self) -> list[ScaleFact]:
        program = self.program
        inputs = []
        for use in program.reads:
            variable = use.variable()
            trained = variable is not None and variable.trainable and jnp.issubdtype(variable.dtype, jnp.inexact)
            locality = use.layout.locality
            inputs.append(ScaleFact(locality, trained=trained, has_unknown=locality is T))
        for (aval, locality), dim in zip(program.arguments, program.dims_of_examples, strict=True):
            if locality is not T:
                inputs.append(ScaleFact(locality, outside=True))
                continue
            place = place_of_examples(aval.shape, dim, self.rows)
            inputs.append(ScaleFact(T, place, has_unknown=place is None))
        return [*inputs, *[self.constant] * len(program.constants)]

    # --- the dataflow -----------------------------------------------------------------------------------------

    def join(self, facts: Iterable[ScaleFact]) -> ScaleFact:
        return join_facts(facts)

    def literal(self, literal: _jax.Literal) -> ScaleFact:
        value = known_number(literal)
        return ScaleFact(number=float(value)) if isinstance(value, int | float) else ScaleFact()

    def decided(self, fact: ScaleFact, decision: ScaleFact) -> ScaleFact:
        if decision.locality is not T or fact.locality is T:
            return fact
        return dataclasses.replace(NOTHING_KNOWN, place=fact.place)

    def sliced(self, facts: list[ScaleFact]) -> list[ScaleFact]:
        if any(m.locality is T and m.place == Rows(0) for m in facts):
            facts = [times_examples_in_loop(m, self.rows, self.program.replicas, self.asked) for m in facts]
        return [self._at(m, sliced_place(m.place)) for m in facts]

    def stacked(self, facts: list[ScaleFact], over: list[ScaleFact]) -> list[ScaleFact]:
        over_examples = any(m.place == Rows(0) for m in over)
        return [
            self._at(m, stacked_place(m.place, over_examples and m.locality is T and not _is_gradient(m)))
            for m in facts
        ]

    def _at(self, m: ScaleFact, place: Place) -> ScaleFact:
        moved = dataclasses.replace(m, place=place, number=None)
        if moved.has_examples:
            back = frozenset(t for t in m.terms if t.level is Level.COTANGENT)
            return dataclasses.replace(moved, terms=back, has_unknown=False)
        return dataclasses.replace(moved, has_unknown=moved.locality is T and (m.has_unknown or not moved.terms))

    def equation(
        self, equation: _jax.Equation, facts: list[ScaleFact], control: Control, final: bool
    ) -> Found[ScaleFact]:
        # A backward pass may begin here, with its weights, or end, with its gradients.
        if self._backward:
            return self._equation(equation, facts, control, final)
        if not _jax.is_backward(equation):
            return self._equation(equation, [leave_backward_pass(m) for m in facts], control, final)
        self._backward = True
        divides = equation.primitive.name in QUOTIENTS  # a divisor is not a derivative
        begun = [
            FIRST_WEIGHT
            if isinstance(v, _jax.Literal) and m.number == 1.0 and shape_of(v) == () and not (divides and i == 1)
            else m
            for i, (v, m) in enumerate(zip(equation.invars, facts, strict=True))
        ]
        results = self._equation(equation, begun, control, final)
        self._backward = False
        return results

    def _equation(
        self, equation: _jax.Equation, facts: list[ScaleFact], control: Control, final: bool
    ) -> Found[ScaleFact]:
        name, count = equation.primitive.name, len(equation.outvars)
        if name in IDENTITIES:
            return facts, facts
        has_programs = _jax.control_flow_of(equation) is not None or _jax.called_program(equation) is not None
        if any(map(is_backward, facts)) and not has_programs and name not in REFERENCES:
            return self._back(equation, facts), facts
        if equation.primitive is mark_p:
            return self._marked_values(equation, facts), facts
        if equation.primitive is share_p:
            return [self._share(equation, facts[0])], facts
        if name in AXIS_POSITION and over_replicas(equation.params):
            return [NOTHING_KNOWN] * count, facts
        if replicas_meet(equation):
            if not all_get_the_same(equation):
                return [NOTHING_KNOWN] * count, facts
            if (equation.primitive is all_reduce_p or name in AXIS_SUMS) and len(facts) == count:
                return [self._summed_value(equation, m) for m in facts], facts
            return [ScaleFact(R, trained=True)] * count, facts
        return super().equation(equation, facts, control, final)

    def operation(
        self, equation: _jax.Equation, facts: list[ScaleFact], control: Control, final: bool
    ) -> Found[ScaleFact]:
        name, count = equation.primitive.name, len(equation.outvars)
        if name in REFERENCES or any(True for _ in _jax.sub_jaxprs(equation)):
            return [NOTHING_KNOWN] * count, [NOTHING_KNOWN] * len(facts)
        localities = result_localities(name, equation.params, [m.locality for m in facts], count)
        if name in LOCALITY_KEPT:
            return facts, facts
        operation = self._operation(equation, facts)
        pairs = zip(localities, self._places(operation), strict=True)
        results = [self._result(operation, locality, place) for locality, place in pairs]
        for term in (t for m in results for t in m.terms if t.level is Level.REDUCED):
            if effective_kind(term, self.program.replicas) is Kind.SHARE:
                self.wrong_means.add(dataclasses.replace(term, kind=Kind.MEAN_OF_MEANS))
        if name in PRODUCTS and self._is_plain_share(facts[0]) and _jax.comes_from(equation, *_MEAN_UPDATE):
            self.wrong_means.add(Term(Kind.MEAN_OF_SHARES, self.note(equation)))
        return results, facts

    def _back(self, equation: _jax.Equation, facts: list[ScaleFact]) -> list[ScaleFact]:
        """The results of an operation in the backward pass of a derivative."""
        name, count = equation.primitive.name, len(equation.outvars)
        operation = self._operation(equation, facts)
        if equation.primitive is share_back_p and count == 1:
            return [through_share(operation, equation.params.get("stated", False))]
        if replicas_meet(equation):
            locality = R if all_get_the_same(equation) else T
            each = facts if len(facts) == count else [join_facts(facts)] * count
            return [reduced_cotangent(operation, m, locality) for m in each]
        if name in LOCALITY_KEPT:
            return facts
        localities = result_localities(name, equation.params, [m.locality for m in facts], count)
        pairs = list(zip(localities, self._places(operation), strict=True))
        operation = without_constants(operation)
        if not any(map(is_backward, operation.facts)):
            return [self._result(operation, locality, place) for locality, place in pairs]
        return [backward(operation, locality, place) for locality, place in pairs]

    @staticmethod
    def _places(operation: ScaledOperation) -> list[Place]:
        shapes = operation.shapes.results
        return [p if shape else None for p, shape in zip(result_places(operation.shapes), shapes, strict=True)]

    def _result(self, operation: ScaledOperation, locality: Locality, place: Place) -> ScaleFact:
        if locality is T:
            return own_result(operation, place) if operation.own else NOTHING_KNOWN
        return ScaleFact(locality, place, trained=True) if operation.own else common_result(operation, place)

    def _operation(self, equation: _jax.Equation, facts: Sequence[ScaleFact]) -> ScaledOperation:
        return ScaledOperation(
            operation_shapes(equation, (m.place for m in facts), self.rows),
            tuple(facts),
            self.note(equation),
            any(jnp.issubdtype(getattr(v.aval, "dtype", jnp.bool_), jnp.inexact) for v in equation.outvars[:1]),
            self.program.replicas,
            self.asked,
            lambda divisor: self._origin(equation, divisor),
        )

    def _origin(self, equation: _jax.Equation, divisor: float) -> Origin:
        """The origin of an equation's divisor."""
        # If replicas can't differ in size, the mean and the sum of one example are the same.
        if (divisor != 1.0 or self.is_ragged) and _jax.comes_from(equation, *_OVER_ELEMENTS):
            return Origin.MEAN
        if not is_close(divisor, self.program.replicas):
            return Origin.UNKNOWN
        by_function = any(_jax.comes_from(equation, [name], file) for name, file in _OVER_REPLICAS)
        return Origin.REPLICAS if by_function or (self.asked and self._is_no_size) else Origin.UNKNOWN

    @functools.cached_property
    def _is_no_size(self) -> bool:
        """Return whether no dim of the program's arrays is as large as the number of replicas."""
        replicas = self.program.replicas
        return not _jax.contains(
            self.program.jaxpr, lambda e: any(replicas in shape_of(v) for v in (*e.invars, *e.outvars))
        )

    # --- where terms begin, and where they become gradients and totals ----------------------------------------

    def _share(self, equation: _jax.Equation, m: ScaleFact) -> ScaleFact:
        """The fact of a value that is marked as a share, by a function of Replicax or by the user."""
        if m.has_examples:
            return m
        line = self.note(equation)
        kind = Kind.SHARE
        if not equation.params.get("stated", False):
            if m.locality is not T:
                twice = sum(f.origin is Origin.REPLICAS for f in m.factors) > 1
            else:
                twice = not m.has_unknown and self._effective_kinds(m.terms) == {Kind.DOUBLE_SCALED}
            kind = Kind.DOUBLE_SCALED if twice else Kind.SHARE
        return ScaleFact(T, m.place, frozenset({Term(kind, line)}), trained=m.trained)

    def _is_plain_share(self, m: ScaleFact) -> bool:
        """Return whether a value is a share that nothing has multiplied, and that is not declared to be one."""
        return m.is_made_of(Level.LOSS, Kind.SHARE) and not any(
            t.factors or self.noted(t.line).params.get("stated", False) for t in m.terms
        )

    def _is_loss(self, equation: _jax.Equation) -> bool:
        """Return whether the equation marks a loss together with its gradients."""
        if equation.primitive is not mark_p:
            return False
        obligation = self.program.obligations.get(equation.params["mark_id"])
        return obligation is not None and obligation.is_loss

    def _marked_values(self, equation: _jax.Equation, facts: list[ScaleFact]) -> list[ScaleFact]:
        loss = facts[0]
        if not self._is_loss(equation):
            obligation = self.program.obligations.get(equation.params["mark_id"])
            if obligation is not None and loss.locality in obligation.refused:
                return [dataclasses.replace(m, terms=frozenset()) for m in facts]  # an error says what is wrong
            return list(facts)
        terms = loss.terms if loss.locality is T else frozenset()
        if Kind.SHARE not in self._effective_kinds(terms):
            # A term that is the same on every replica should be divided only if it is added to a share.
            terms = frozenset(t for t in terms if self._effective_kinds([t]) != {Kind.REPEATED})
        terms = frozenset(settle(t, self.program.replicas).at(Level.GRADIENT) for t in terms) or frozenset(
            {Term(Kind.UNKNOWN, self.note(equation), Level.GRADIENT)}
        )
        return [loss, *[ScaleFact(T, None, terms, trained=True)] * (len(equation.outvars) - 1)]

    def _summed_value(self, equation: _jax.Equation, m: ScaleFact) -> ScaleFact:
        """The sum over the replicas."""
        if m.locality is T:
            terms = {t.at(Level.TOTAL) for t in m.terms if t.level is Level.GRADIENT} | self._averages(equation, m)
        else:
            again = Term(Kind.SUMMED_TWICE, self.note(equation), Level.TOTAL)
            right = any(t.level is Level.TOTAL and self._effective_kinds([t]) == {Kind.SHARE} for t in m.terms)
            terms = {again} if right else set()
        return ScaleFact(R, terms=frozenset(terms), trained=m.trained)

    def _averages(self, equation: _jax.Equation, m: ScaleFact) -> set[Term]:
        """The means over examples that are summed over replicas with different numbers of examples."""
        if not self.is_ragged or m.has_unknown or m.has_examples or any(map(shape_of, equation.outvars)):
            return set()
        terms = {settle(t, self.program.replicas) for t in m.terms if t.level is Level.LOSS}
        return {t.at(Level.REDUCED) for t in terms if t.kind is Kind.MEAN and not t.factors}

    def _effective_kinds(self, terms: Iterable[Term]) -> set[Kind | None]:
        return {effective_kind(t, self.program.replicas) for t in terms}


def _is_gradient(m: ScaleFact) -> bool:
    return any(t.level is Level.GRADIENT for t in m.terms)
