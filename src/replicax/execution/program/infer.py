"""Infer: is each value the same on all replicas, or may it differ?

One pass over the traced program. Its inputs are per-replica (T) or mirrored (M). A collective with the same result on
every replica (``psum``, ``all_gather``, …) gives R, which is an M that has been reduced; ``axis_index``, collectives
with different results and operations whose results are not functions of their operands give T; all others join their
operands. Loops run to a fixpoint; a branch joins its branches with its predicate; a mutable array keeps what is
written into it. Models need no annotations, and none are read.

The pass also answers the marks of :mod:`replicax.execution.program.marks`, and finds deadlocks: a collective inside a
loop or branch whose predicate is T, where replicas may disagree on whether, or how often, it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replicax import _jax
from replicax._jax.primitive_families import AXIS_POSITION, FORWARD_OF_CUSTOM_VJPS, WRITES
from replicax.collectives import all_reduce_p, gathered_p, own_sum_p
from replicax.errors import DeadlockError, LocalityError
from replicax.execution.program.collective_operations import all_get_the_same, over_replicas, replicas_meet
from replicax.execution.program.dataflow import Control, Dataflow, Found
from replicax.execution.program.locality_rules import ALWAYS, join, result_localities
from replicax.execution.program.marks import Obligation, mark_p
from replicax.locality import Locality, M, R, T


def infer(
    jaxpr: _jax.Jaxpr,
    inputs: Sequence[Locality],
    obligations: Mapping[int, Obligation],
    *,
    check: bool = True,
    localities: dict[Any, Locality] | None = None,
) -> list[Locality]:
    """The locality of each output of ``jaxpr``, a program of one replica, given those of its inputs.

    ``obligations`` are what the marks in the program ask for, by number. ``check``: whether to raise; with a single
    replica nothing can differ, so nothing is checked. ``localities`` takes those of all values in the program, joined
    with those that it has already.

    Raises:
      LocalityError: an obligation does not hold.
      DeadlockError: replicas may disagree on whether a collective runs.
      TypeError: either is due to a derivative that JAX can't compute.

    >>> import jax
    >>> from replicax.execution.program.infer import infer
    >>> from replicax.locality import M, T
    >>> program = jax.make_jaxpr(lambda x, m: (x + m, m * 2))(1.0, 2.0).jaxpr
    >>> infer(program, [T, M], {})
    [<Locality.PER_REPLICA: 'T'>, <Locality.MIRRORED: 'M'>]
    """
    inference = _Inference(obligations if check else {}, check, localities)
    try:
        return inference.run(jaxpr, inputs, final=True)[0]
    except (LocalityError, DeadlockError) as error:
        equations = _jax.equations_of(jaxpr)
        for equation in equations:
            if equation.primitive.name in FORWARD_OF_CUSTOM_VJPS:
                raise TypeError(_FORWARD.format(_jax.source_line(equation))) from None
        if isinstance(error, DeadlockError) and any(replicas_meet(e) and _jax.is_backward(e) for e in equations):
            raise DeadlockError(f"{error}{_OF_TOTALS}") from None
        raise


def localities_of(jaxpr: _jax.Jaxpr, inputs: Sequence[Locality]) -> dict[Any, Locality]:
    """The locality of each value in a program; a value that is computed in several places has the join of these."""
    localities: dict[Any, Locality] = {}
    infer(jaxpr, inputs, {}, check=False, localities=localities)
    return localities


def infer_equation(equation: Any, operands: list[Locality], obligations: Mapping[int, Obligation]) -> list[Locality]:
    """The localities of an equation's results, given those of its operands; raises as :func:`infer` does."""
    return _Inference(obligations, True).equation(equation, operands, None, final=True)[0]


_OF_TOTALS = (
    " If the decision depends on a gradient of an all-reduced value, as in a line search (optax.lbfgs, optimistix, "
    "jaxopt): that gradient differs, because each replica differentiates its own part of the sum. Give the solver "
    "replicax.total_of_shares(fn), where fn computes this replica's share without an all_reduce: its value and its "
    "gradient are the same on every replica."
)


_FORWARD = (
    "can't apply forward-mode autodiff (jax.jvp, jacfwd, hessian) to a custom_vjp function, such as that of "
    "replicax.total_of_shares, at {}: use reverse mode (jax.grad, jax.jacrev)"
)


class _Inference(Dataflow[Locality]):
    """The pass over one program; a decision matters if it is per-replica."""

    def __init__(
        self, obligations: Mapping[int, Obligation], check: bool, localities: dict[Any, Locality] | None = None
    ) -> None:
        super().__init__(M, localities)
        self.obligations = obligations
        self.check = check

    def join(self, facts: Iterable[Locality]) -> Locality:
        return join(facts)

    def decided(self, fact: Locality, decision: Locality) -> Locality:
        return fact | decision

    def inside(self, where: str, decision: Locality, control: Control) -> Control:
        return where if decision is T else control

    def equation(
        self, equation: _jax.Equation, facts: list[Locality], control: Control, final: bool
    ) -> Found[Locality]:
        name, count = equation.primitive.name, len(equation.outvars)
        if equation.primitive is mark_p and final and equation.params["mark_id"] in self.obligations:
            self.obligations[equation.params["mark_id"]].check(facts[0], equation)
        if name in ALWAYS:
            return result_localities(name, equation.params, facts, count), facts
        if name in AXIS_POSITION:
            return [T if over_replicas(equation.params) else M] * count, facts
        if replicas_meet(equation):
            return self._meeting(equation, facts, control, final)
        return super().equation(equation, facts, control, final)

    def operation(
        self, equation: _jax.Equation, facts: list[Locality], control: Control, final: bool
    ) -> Found[Locality]:
        name, count = equation.primitive.name, len(equation.outvars)
        if name in WRITES:
            joined = join(facts) | (T if control else M)
            return [joined] * count, [joined, *facts[1:]]
        inner = _jax.sub_jaxprs(equation)
        if not inner:
            return result_localities(name, equation.params, facts, count), facts
        # A primitive with programs inside that we know nothing of: anything may reach anything.
        joined = join(facts)
        for jaxpr in inner:
            outputs, _ = self.run(jaxpr, [joined] * len(jaxpr.invars), control, final=final)
            joined = joined | join(outputs)
        results = result_localities(name, equation.params, [joined], count)
        is_known = _jax.is_deterministic(name, equation.params) and not replicas_meet(equation)
        return results, [joined if is_known else T] * len(facts)

    def _meeting(
        self, equation: _jax.Equation, facts: list[Locality], control: Control, final: bool
    ) -> Found[Locality]:
        if control and final and self.check:
            raise DeadlockError(
                f"the collective {equation.primitive.name} at {_jax.source_line(equation)} stands {control}, and what "
                "decides differs between replicas: some would wait in it for ever for the others. Move the collective "
                "out, or make the decision the same everywhere (for example with all_reduce)."
            )
        count = len(equation.outvars)
        if all_get_the_same(equation):
            return [R] * count, facts
        return [T] * count, self.operation(equation, facts, control, final)[1]


# --- sums of the replicas' own values -------------------------------------------------------------------


def with_all_reduces(jaxpr: _jax.Jaxpr, inputs: Sequence[Locality]) -> _jax.Jaxpr:
    """``jaxpr`` with an all-reduce for each :data:`~replicax.collectives.own_sum_p`, of what has not been reduced.

    Whether a value has been reduced already is known only when the whole step has been traced. So such a sum is
    recorded as a primitive of its own; values that have been reduced are its results as they are.
    """
    return _rewritten(jaxpr, localities_of(jaxpr, inputs))


def _rewritten(jaxpr: _jax.Jaxpr, localities: Mapping[Any, Locality]) -> _jax.Jaxpr:
    equations: list[_jax.Equation] = []
    for e in jaxpr.eqns:
        if e.primitive is not own_sum_p:
            equations.append(e.replace(params=_jax.map_jaxprs(e.params, lambda inner: _rewritten(inner, localities))))
            continue
        reduced = [not isinstance(v, _jax.Literal) and localities[v] is R for v in e.invars]
        for primitive, params, chosen in ((gathered_p, {}, True), (all_reduce_p, e.params, False)):
            places = [i for i, is_reduced in enumerate(reduced) if is_reduced is chosen]
            if places:
                operands, results = [e.invars[i] for i in places], [e.outvars[i] for i in places]
                equations.append(e.replace(primitive=primitive, params=params, invars=operands, outvars=results))
    return jaxpr.replace(eqns=equations)
