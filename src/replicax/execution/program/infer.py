"""Infer: is each value the same on all replicas, or may it differ?

One pass over the traced program. Its inputs are T (per replica) or M (mirrored); a collective that hands every
replica the same thing (``psum``, ``all_gather``, …) gives R, which is an M that has been reduced; ``axis_index``,
collectives that hand out different parts and operations whose results are not functions of their operands give T;
anything else joins its operands. Loops run to a fixpoint; a branch joins its branches with its predicate; what is
written into a mutable array stays in it. No annotation in anybody's model is needed, and none is read.

The pass also answers the marks of :mod:`replicax.execution.program.marks`, and finds deadlocks: a collective inside a
loop or branch whose predicate is T, where replicas may disagree on whether, or how often, it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from replicax import _jax
from replicax._jax import primitive_families
from replicax._jax.primitive_families import ALIKE_ALONG_AXIS, AXIS_CASTS, CONTROL_FLOW, WRITES
from replicax.collectives import alone_p, share_p
from replicax.devices.mesh import REPLICA_AXIS
from replicax.errors import DeadlockError
from replicax.execution.program.locality_rules import ALWAYS, LOCALITY_KEPT, join, result_localities
from replicax.execution.program.marks import Obligation, mark_p
from replicax.locality import Locality, M, R, T

# What hands every replica the same thing. Any other primitive whose params name the replicas' axis is taken for one
# that hands out different parts, as ppermute and all_to_all do: what JAX may come to have is never M by mistake.
_AGREEING = ALIKE_ALONG_AXIS | {"all_reduce", "uneven_gather"}
ONE_BY_ONE = primitive_families.HANDED_ON | {alone_p.name, share_p.name}
"""Each result belongs to the operand in its place, and to no other; and replicas do not meet."""

Divergence = str | None
"""Why replicas may disagree on running something at all; ``None`` if they don't."""


def infer(
    jaxpr: _jax.Jaxpr,
    inputs: Sequence[Locality],
    obligations: Mapping[int, Obligation],
    *,
    check: bool = True,
    found: dict[Any, Locality] | None = None,
) -> list[Locality]:
    """The locality of each output of ``jaxpr``, given those of its inputs.

    Args:
      jaxpr: a program over one replica's values, inside the mesh's replica axis.
      inputs: the locality of each input.
      obligations: what the marks in the program ask for, by number.
      check: whether to raise; with a single replica nothing can differ, so nothing is checked.
      found: takes the localities of all values in the program; of one that is computed in several places, their join.

    Raises:
      LocalityError: an obligation does not hold.
      DeadlockError: replicas may disagree on whether a collective runs.

    >>> import jax
    >>> from replicax.execution.program.infer import infer
    >>> from replicax.locality import M, T
    >>> program = jax.make_jaxpr(lambda x, m: (x + m, m * 2))(1.0, 2.0).jaxpr
    >>> infer(program, [T, M], {})
    [<Locality.PER_REPLICA: 'T'>, <Locality.MIRRORED: 'M'>]
    """
    return _Pass(obligations if check else {}, check, found).run(jaxpr, inputs, None, final=True)[0]


def infer_equation(equation: Any, operands: list[Locality], obligations: Mapping[int, Obligation]) -> list[Locality]:
    """The localities of an equation's results, given those of its operands.

    Raises:
      LocalityError: an obligation inside does not hold.
      DeadlockError: replicas may disagree on whether a collective inside runs.
    """
    return _Pass(obligations, True).equation(equation, operands, None, final=True)[0]


def is_collective(equation: Any) -> bool:
    """Whether an equation is a collective of the replicas, or there is one in the programs inside."""
    if replicas_meet(equation):
        return True
    return any(is_collective(e) for jaxpr in _jax.sub_jaxprs(equation) for e in jaxpr.eqns)


class _Pass:
    """The pass over one program.

    Each method takes the localities of an equation's operands, and returns those of its results, and those of
    the operands afterwards: an operand that is a mutable array takes on what is written into it.
    """

    def __init__(
        self, obligations: Mapping[int, Obligation], check: bool, found: dict[Any, Locality] | None = None
    ) -> None:
        self.obligations = obligations
        self.check = check
        self.everything = found
        # Nested loops would otherwise repeat the search of their inner loops' fixpoints again and again.
        self.known: dict[Any, tuple[list[Locality], list[Locality]]] = {}

    def run(
        self, jaxpr: _jax.Jaxpr, inputs: Sequence[Locality], divergence: Divergence, *, final: bool
    ) -> tuple[list[Locality], list[Locality]]:
        """Localities of the outputs, and of the inputs afterwards.

        Fixpoints are searched with ``final=False``, which checks nothing; then what was found is checked.
        """
        key = (id(jaxpr), tuple(inputs), divergence is not None)
        if not final and key in self.known:
            return self.known[key]
        env: dict[Any, Locality] = dict.fromkeys(jaxpr.constvars, M)
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Locality:
            return M if isinstance(atom, _jax.Literal) else env[atom]

        for equation in jaxpr.eqns:
            results, after = self.equation(equation, [read(v) for v in equation.invars], divergence, final)
            for v, locality in zip(equation.invars, after, strict=True):
                if _jax.is_mutable(v):
                    env[v] = env[v] | locality
            env.update(zip(equation.outvars, results, strict=True))
        if final and self.everything is not None:
            for v, locality in env.items():
                self.everything[v] = self.everything.get(v, M) | locality
        found = [read(v) for v in jaxpr.outvars], [env[v] for v in jaxpr.invars]
        self.known[key] = found
        return found

    def equation(
        self, equation: Any, operands: list[Locality], divergence: Divergence, final: bool
    ) -> tuple[list[Locality], list[Locality]]:
        primitive, params = equation.primitive, equation.params
        name, count = primitive.name, len(equation.outvars)
        if primitive is mark_p and final:
            self.answer(equation, operands[0])
        if name in ALWAYS or name in LOCALITY_KEPT:
            return result_localities(name, params, operands, count), operands
        if name == "axis_index":
            return [T if over_replicas(params) else M] * count, operands
        if replicas_meet(equation):
            if divergence and final and self.check:
                raise DeadlockError(
                    f"the collective {name} at {_jax.source_line(equation)} stands {divergence}, and what decides "
                    "differs between replicas: some would wait in it for ever for the others. Move the collective "
                    "out, or make the decision the same everywhere (for example with all_reduce)."
                )
            if name.removesuffix("_start") in _AGREEING and params.get("axis_index_groups") is None:
                return [R] * count, operands
        if name in WRITES:
            joined = join(operands) | (T if divergence else M)
            return [joined] * count, [joined, *operands[1:]]
        if name == "while":
            return self.while_loop(equation, operands, divergence, final)
        if name == "cond":
            return self.branches(equation, operands, divergence, final)
        if name == "scan":
            return self.scan(params, operands, divergence, final)
        return self.call_or_join(equation, operands, divergence, final)

    def answer(self, equation: Any, found: Locality) -> None:
        obligation = self.obligations.get(equation.params["mark_id"])
        if obligation is not None:
            obligation.check(found, equation)

    # --- control flow -----------------------------------------------------------------------------------

    def while_loop(
        self, equation: Any, operands: list[Locality], divergence: Divergence, final: bool
    ) -> tuple[list[Locality], list[Locality]]:
        loop = _jax.while_of(equation.params)
        test, body, n_test = loop.test, loop.body, loop.test_constants
        n_consts = n_test + loop.body_constants
        decision = M
        while True:
            inside = "inside a while loop" if decision is T else divergence
            [decided], test_after = self.run(test, [*operands[:n_test], *operands[n_consts:]], inside, final=False)
            results, body_after = self.run(body, operands[n_test:], inside, final=False)
            decision = decision | decided
            carry = [a | b | decision for a, b in zip(operands[n_consts:], results, strict=True)]
            after = [*test_after[:n_test], *body_after[: n_consts - n_test], *carry]
            if after == operands:
                break
            operands = [a | b for a, b in zip(operands, after, strict=True)]
        if final:
            inside = "inside a while loop" if decision is T else divergence
            self.run(test, [*operands[:n_test], *operands[n_consts:]], inside, final=True)
            self.run(body, operands[n_test:], inside, final=True)
        return operands[n_consts:], operands

    def branches(
        self, equation: Any, operands: list[Locality], divergence: Divergence, final: bool
    ) -> tuple[list[Locality], list[Locality]]:
        decision, arguments = operands[0], operands[1:]
        inside = "inside a branch (jax.lax.cond or switch)" if decision is T else divergence
        results = [decision] * len(equation.outvars)
        after = arguments
        for branch in _jax.branches_of(equation.params):
            outputs, touched = self.run(branch, arguments, inside, final=final)
            results = [a | b for a, b in zip(results, outputs, strict=True)]
            after = [a | b for a, b in zip(after, touched, strict=True)]
        return results, [decision, *after]

    def scan(
        self, params: Mapping[str, Any], operands: list[Locality], divergence: Divergence, final: bool
    ) -> tuple[list[Locality], list[Locality]]:
        loop = _jax.scan_of(params)
        body, n_consts, n_carry = loop.body, loop.constants, loop.carried
        while True:
            outputs, after = self.run(body, operands, divergence, final=False)
            carry = [a | b for a, b in zip(operands[n_consts : n_consts + n_carry], outputs[:n_carry], strict=True)]
            after = [*after[:n_consts], *carry, *after[n_consts + n_carry :]]
            if after == operands:
                break
            operands = [a | b for a, b in zip(operands, after, strict=True)]
        if final:
            self.run(body, operands, divergence, final=True)
        return [*operands[n_consts : n_consts + n_carry], *outputs[n_carry:]], operands

    # --- everything else --------------------------------------------------------------------------------

    def call_or_join(
        self, equation: Any, operands: list[Locality], divergence: Divergence, final: bool
    ) -> tuple[list[Locality], list[Locality]]:
        meets = replicas_meet(equation)
        called = called_program(equation)
        if called is not None and not meets:
            return self.run(called, operands, divergence, final=final)
        joined = join(operands)
        inner = _jax.sub_jaxprs(equation)
        for jaxpr in inner:
            # A primitive with programs inside that we know nothing of: anything may reach anything.
            outputs, _ = self.run(jaxpr, [joined] * len(jaxpr.invars), divergence, final=final)
            joined = joined | join(outputs)
        if meets or equation.params.get("has_side_effect"):
            joined = T
        return [joined] * len(equation.outvars), [joined] * len(operands) if inner else operands


def replicas_meet(equation: Any) -> bool:
    """Whether replicas meet in an equation."""
    return equation.primitive.name not in AXIS_CASTS | {"axis_index"} and over_replicas(equation.params)


def over_replicas(params: Mapping[str, Any]) -> bool:
    """Whether params of a primitive name the replicas' axis; they have many names for that."""
    return any(_names_replicas(value) for name, value in params.items() if "axis" in name or "axes" in name)


def _names_replicas(value: Any) -> bool:
    if isinstance(value, (tuple, list, set, frozenset)):
        return any(map(_names_replicas, value))
    return isinstance(value, str) and value == REPLICA_AXIS


def called_program(equation: Any) -> Any:
    """The one program that an equation simply applies to its operands (jit, checkpoint, custom_vjp, …)."""
    if equation.primitive.name in CONTROL_FLOW:
        return None
    params = equation.params
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in params:
            inner = _jax.open_jaxpr(params[name])
            if hasattr(inner, "eqns") and _fit(inner.invars, equation.invars) and _fit(inner.outvars, equation.outvars):
                return inner
    return None


def _fit(inner: Sequence[Any], outer: Sequence[Any]) -> bool:
    """Whether the operands or results of a program are those of an equation, and not, say, single elements of them."""
    return len(inner) == len(outer) and all(
        getattr(a.aval, "shape", None) == getattr(b.aval, "shape", None) for a, b in zip(inner, outer, strict=True)
    )
