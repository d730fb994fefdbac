"""Infer: is each value the same on all replicas, or may it differ?

One pass over the traced program. Its inputs are T (per replica) or M (mirrored); a collective that hands every
replica the same thing (``psum``, ``all_gather``, …) gives M; ``axis_index`` and collectives that hand out
different parts give T; everything else joins its operands. Loops run to a fixpoint; a branch joins its
branches with its predicate. No annotation in anybody's model is needed, and none is read.

The pass also answers the marks of :mod:`replicax.execution.marks`, and finds deadlocks: a collective inside a
loop or branch whose predicate is T, where replicas may disagree on whether, or how often, it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from replicax import _jax
from replicax.errors import DeadlockError, LocalityError
from replicax.execution.marks import Locality, M, Obligation, T, mark_p
from replicax.reduction import alone_p
from replicax.topology.mesh import REPLICA_AXIS

_AGREEING = {"psum", "pmax", "pmin", "all_gather", "psum_invariant", "all_gather_invariant", "pbroadcast"}
_DISAGREEING = {
    "ppermute",
    "all_to_all",
    "ragged_all_to_all",
    "reduce_scatter",
    "psend",
    "precv",
    "axis_index",
}
_IMPURE = {"io_callback", "debug_callback"}


def infer(
    jaxpr: _jax.Jaxpr,
    inputs: Sequence[Locality],
    obligations: Mapping[int, Obligation],
    *,
    check: bool = True,
) -> list[Locality]:
    """The locality of each output of ``jaxpr``, given those of its inputs.

    Args:
      jaxpr: a program over one replica's values, inside the mesh's replica axis.
      inputs: the locality of each input.
      obligations: what the marks in the program ask for, by number.
      check: whether to raise; with a single replica nothing can differ, so nothing is checked.

    Raises:
      LocalityError: an obligation does not hold.
      DeadlockError: replicas may disagree on whether a collective runs.
    """
    return _Pass(obligations if check else {}, check).run(jaxpr, inputs, None, final=True)


class _Pass:
    def __init__(self, obligations: Mapping[int, Obligation], check: bool) -> None:
        self.obligations = obligations
        self.check = check
        # Nested loops would otherwise repeat the search of their inner loops' fixpoints again and again.
        self.known: dict[tuple[int, tuple[Locality, ...]], list[Locality]] = {}

    def run(
        self, jaxpr: _jax.Jaxpr, inputs: Sequence[Locality], divergence: str | None, *, final: bool
    ) -> list[Locality]:
        """Localities of the outputs. ``divergence`` says why replicas may disagree on running this at all.

        Fixpoints are searched with ``final=False``, which checks nothing; then what was found is checked.
        """
        key = (id(jaxpr), tuple(inputs))
        if not final and key in self.known:
            return self.known[key]
        env: dict[Any, Locality] = dict(zip(jaxpr.constvars, [M] * len(jaxpr.constvars), strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Locality:
            return M if isinstance(atom, _jax.Literal) else env[atom]

        for equation in jaxpr.eqns:
            operands = [read(v) for v in equation.invars]
            results = self.equation(equation, operands, divergence, final)
            env.update(zip(equation.outvars, results, strict=True))
        outputs = [read(v) for v in jaxpr.outvars]
        self.known[key] = outputs
        return outputs

    def equation(self, equation: Any, operands: list[Locality], divergence: str | None, final: bool) -> list[Locality]:
        name, params = equation.primitive.name, equation.params
        count = len(equation.outvars)
        if equation.primitive is mark_p:
            if final:
                self.answer(equation, operands[0])
            return operands
        if equation.primitive is alone_p:
            return [M]
        if name in _AGREEING | _DISAGREEING and _over_replicas(params):
            if divergence and final and self.check and name != "axis_index":
                raise DeadlockError(
                    f"the collective {name} at {_jax.source_line(equation)} stands {divergence}, and what decides "
                    "differs between replicas: some would wait in it for ever for the others. Move the collective "
                    "out, or make the decision the same everywhere (for example with all_reduce)."
                )
            agreeing = name in _AGREEING and params.get("axis_index_groups") is None
            return [M if agreeing else T] * count
        if name == "while":
            return self.while_loop(params, operands, divergence, final)
        if name == "cond":
            return self.branches(equation, operands, divergence, final)
        if name == "scan":
            return self.scan(params, operands, divergence, final)
        return self.call_or_join(equation, operands, divergence, final)

    def answer(self, equation: Any, found: Locality) -> None:
        obligation = self.obligations.get(equation.params["mark_id"])
        if obligation is not None and found is not obligation.expected:
            raise LocalityError(f"{obligation.otherwise}\n  at {_jax.source_line(equation)}")

    # --- control flow -----------------------------------------------------------------------------------

    def while_loop(
        self, params: Mapping[str, Any], operands: list[Locality], divergence: str | None, final: bool
    ) -> list[Locality]:
        test, body = _jax.open_jaxpr(params["cond_jaxpr"]), _jax.open_jaxpr(params["body_jaxpr"])
        n_test, n_body = params["cond_nconsts"], params["body_nconsts"]
        test_consts, body_consts = operands[:n_test], operands[n_test : n_test + n_body]
        carry = operands[n_test + n_body :]
        while True:
            decision = self.run(test, [*test_consts, *carry], divergence, final=False)[0]
            after = self.run(body, [*body_consts, *carry], divergence, final=False)
            joined = [a | b | decision for a, b in zip(carry, after, strict=True)]
            if joined == carry:
                break
            carry = joined
        if final:
            inside = "inside a while loop" if decision is T else divergence
            self.run(test, [*test_consts, *carry], inside, final=True)
            self.run(body, [*body_consts, *carry], inside, final=True)
        return carry

    def branches(self, equation: Any, operands: list[Locality], divergence: str | None, final: bool) -> list[Locality]:
        decision, arguments = operands[0], operands[1:]
        inside = "inside a branch (jax.lax.cond or switch)" if decision is T else divergence
        results = [decision] * len(equation.outvars)
        for branch in equation.params["branches"]:
            outputs = self.run(_jax.open_jaxpr(branch), arguments, inside, final=final)
            results = [a | b for a, b in zip(results, outputs, strict=True)]
        return results

    def scan(
        self, params: Mapping[str, Any], operands: list[Locality], divergence: str | None, final: bool
    ) -> list[Locality]:
        body = _jax.open_jaxpr(params["jaxpr"])
        n_consts, n_carry = params["num_consts"], params["num_carry"]
        consts, carry, xs = (
            operands[:n_consts],
            operands[n_consts : n_consts + n_carry],
            operands[n_consts + n_carry :],
        )
        while True:
            outputs = self.run(body, [*consts, *carry, *xs], divergence, final=False)
            joined = [a | b for a, b in zip(carry, outputs[:n_carry], strict=True)]
            if joined == carry:
                break
            carry = joined
        if final:
            self.run(body, [*consts, *carry, *xs], divergence, final=True)
        return [*carry, *outputs[n_carry:]]

    # --- everything else --------------------------------------------------------------------------------

    def call_or_join(
        self, equation: Any, operands: list[Locality], divergence: str | None, final: bool
    ) -> list[Locality]:
        count = len(equation.outvars)
        joined = M
        for operand in operands:
            joined = joined | operand
        called = _called(equation)
        if called is not None:
            return self.run(called, operands, divergence, final=final)
        for inner in _jax.sub_jaxprs(equation):
            # An unknown primitive that contains programs: assume the worst about what reaches them.
            inside = f"inside {equation.primitive.name}" if joined is T else divergence
            for output in self.run(inner, [joined] * len(inner.invars), inside, final=final):
                joined = joined | output
        if equation.primitive.name in _IMPURE:
            joined = T  # each replica calls the host by itself, and the host may answer as it likes
        return [joined] * count


def _over_replicas(params: Mapping[str, Any]) -> bool:
    axes = params.get("axes", params.get("axis_name", ()))
    return REPLICA_AXIS in (axes if isinstance(axes, (tuple, list, set, frozenset)) else (axes,))


def _called(equation: Any) -> Any:
    """The one program that an equation simply applies to its operands (jit, checkpoint, custom_vjp, …)."""
    params = equation.params
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in params:
            inner = _jax.open_jaxpr(params[name])
            same_inputs = hasattr(inner, "eqns") and len(inner.invars) == len(equation.invars)
            if same_inputs and len(inner.outvars) == len(equation.outvars):
                return inner
    return None
