"""The derivatives of single operations, each traced once.

JAX traces the rule of an operation's derivative whenever the operation is differentiated. That is little beside a
compilation, but without one it is most of the time of a gradient. A rule has the same result for operands of the same
kinds, so the result is kept here: a program that computes the operation's results and the residuals of the derivative,
and the derivative, which is linear.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.interpreters.ad import Zero as _Zero

from replicax._jax.internals import ad as _ad, config as _config, core as _core
from replicax._jax.jaxprs.programs import enable_x64_for
from replicax._jax.jaxprs.types import Literal, Primitive, shape_of
from replicax._jax.primitive_families import HANDED_ON
from replicax.per_replica.eager.linear_maps import LinearMap
from replicax.per_replica.eager.operation_keys import operation_key
from replicax.per_replica.eager.operations import Operations

_MOST = 16384  # derivatives that are kept
_derivatives: dict[Any, Derivative | None] = {}
_lock = threading.RLock()
_jaxs_rule = _ad.fallback_linearize_rule
"""Traces the rule of the derivative."""


class Derivative:
    """The derivative of one operation for operands of certain kinds, as programs."""

    def __init__(
        self, rule: Callable[..., Any], multiple: bool, nonzeros: Sequence[bool], avals: Sequence[Any], params: Any
    ) -> None:
        parts: list[Any] = []

        def forward(*operands: Any) -> Any:
            with jax.disable_jit():
                results, nonzero, residuals, *structured, linear = rule(*operands, **params)
            parts[:] = nonzero, structured, linear
            return [*(results if multiple else [results]), *residuals]

        program = jax.make_jaxpr(forward)(*map(shape_of, avals))
        nonzero, structured, linear = parts
        self.is_pure = not program.consts and not program.effects and all(s is None for s in structured)
        self._multiple = multiple
        self._nonzero = list(nonzero) if multiple else [nonzero]
        self._in_nonzero = nonzeros
        self._structured = structured
        self._tangents = [a.to_tangent_aval() for a in program.out_avals[: len(self._nonzero)]]
        self._read_program(program)
        self._linear = self._traced_map(linear, avals, program.out_avals[len(self._nonzero) :])

    def _read_program(self, program: Any) -> None:
        """Find out which outputs are operands, and from which operands the others are computed."""
        jaxpr = getattr(program, "jaxpr", program)
        needs = {v: {i} for i, v in enumerate(jaxpr.invars)}
        for equation in jaxpr.eqns:
            of_operands = [set[int]() if isinstance(v, Literal) else needs[v] for v in equation.invars]
            if equation.primitive.name in HANDED_ON:
                needs.update(zip(equation.outvars, of_operands, strict=True))
            else:
                needs.update(dict.fromkeys(equation.outvars, set[int]().union(*of_operands)))
        operands = {v: (False, i) for i, v in enumerate(jaxpr.invars)}
        variables = [v for v in jaxpr.outvars if not isinstance(v, Literal)]
        computed = {v: (True, i) for i, v in enumerate(dict.fromkeys(v for v in variables if v not in operands))}
        self._outputs = [
            (None, v.val) if isinstance(v, Literal) else operands[v] if v in operands else computed[v]
            for v in jaxpr.outvars
        ]
        self.needs = [sorted(needs[v]) for v in computed]
        """For each computed array, the operands that it is computed from."""
        places = [jaxpr.outvars.index(v) for v in computed]

        def compute(*operands: Any) -> list[Any]:
            outputs = jax.core.eval_jaxpr(jaxpr, program.consts, *operands)
            return [outputs[i] for i in places]

        self.compute = compute
        """Computes, from the operands, the outputs that are not operands."""

    def _traced_map(self, linear: Any, avals: Sequence[Any], residuals: Sequence[Any]) -> LinearMap:
        """The derivative as a program of the residuals and of those tangents that aren't zero."""
        kinds = [a.to_tangent_aval() for a in avals]

        def apply(residuals: Any, nonzero: Any) -> Any:
            rest = iter(nonzero)
            tangents = [next(rest) if nz else _Zero(k) for k, nz in zip(kinds, self._in_nonzero, strict=True)]
            with jax.disable_jit():
                results = linear(residuals, *self._structured, *tangents)
            return [t for t in (results if self._multiple else [results]) if type(t) is not _Zero]

        nonzero = [k for k, nz in zip(kinds, self._in_nonzero, strict=True) if nz]
        program = jax.make_jaxpr(apply)(list(map(shape_of, residuals)), list(map(shape_of, nonzero)))
        self.is_pure = self.is_pure and not program.consts and not program.effects
        return LinearMap(program.jaxpr)

    def linearized(self, operands: Sequence[Any], computed: Sequence[Any]) -> tuple[Any, ...]:
        """The return value of JAX's rule, from the operands and the results of ``compute``."""
        outputs = [v if c is None else computed[v] if c else operands[v] for c, v in self._outputs]
        n = len(self._nonzero)
        results, residuals = outputs[:n], outputs[n:]

        def linear(residuals: Any, *structured_and_tangents: Any) -> Any:
            tangents = structured_and_tangents[len(self._structured) :]
            nonzero = [t for t, nz in zip(tangents, self._in_nonzero, strict=True) if nz]
            tangents_out = iter(self._linear.bind([*residuals, *nonzero]))
            everyone = [
                next(tangents_out) if nz else _Zero(a) for nz, a in zip(self._nonzero, self._tangents, strict=True)
            ]
            return everyone if self._multiple else everyone[0]

        structured = [None] * len(self._structured)
        if self._multiple:
            return results, self._nonzero, residuals, *structured, linear
        return results[0], self._nonzero[0], residuals, *structured, linear


def derivative_of(
    operations: Operations, primitive: Primitive, rule: Callable[..., Any], nonzeros: Any, operands: Any, params: Any
) -> Derivative | None:
    """The derivative of an operation, for operands of these kinds; ``None`` if JAX is to find it."""
    avals = operations.kinds(primitive, operands, params)
    if avals is None:
        return None
    operation = operation_key(primitive, params, avals)
    if operation is None:
        return None
    key = tuple(nonzeros), _config.trace_context(), operation
    if key in _derivatives:
        return _derivatives[key]
    with _lock, jax.disable_jit(False), jax.default_device(None), _core.set_current_trace(_core.eval_trace):
        everywhere = tuple(nonzeros), _config.trace_context(), operation  # the settings name the device
        if everywhere not in _derivatives:
            try:
                with enable_x64_for(avals):
                    derivative: Derivative | None = Derivative(
                        rule, primitive.multiple_results, nonzeros, avals, params
                    )
            except Exception:  # it asks for values; JAX raises again whatever is wrong
                derivative = None
            _derivatives[everywhere] = derivative if derivative is not None and derivative.is_pure else None
        _derivatives[key] = _derivatives[everywhere]
        while len(_derivatives) > _MOST:
            del _derivatives[next(iter(_derivatives))]
        return _derivatives[key]


def _linearized_operation(
    primitive: Primitive, is_vjp: Any, nonzeros: Sequence[bool], /, *operands: Any, **params: Any
) -> Any:
    linearize = getattr(_core.trace_ctx.trace, "linearize", None)
    if linearize is not None:  # a trace of ours computes
        rule = functools.partial(_jaxs_rule, primitive, is_vjp, nonzeros)
        linearized = linearize(rule, primitive, nonzeros, operands, params)
        if linearized is not None:
            return linearized
    return _jaxs_rule(primitive, is_vjp, nonzeros, *operands, **params)


_users = 0


@contextlib.contextmanager
def tracing_rules_once() -> Iterator[None]:
    """A context in which the derivative rules of our traces are traced once; JAX's own function is back afterwards.

    JAX asks one function for the derivative of an operation that has no rule for it, and has no other way to give it
    one but for a single operation, for good. While ``replicax.debug()`` runs a step, that function asks our traces
    first, on the threads that have one. Other threads get what they always get.
    """
    global _users
    with _lock:
        _users += 1
        _ad.fallback_linearize_rule = _linearized_operation  # type: ignore[assignment]
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _ad.fallback_linearize_rule = _jaxs_rule
