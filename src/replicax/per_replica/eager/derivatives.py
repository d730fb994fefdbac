"""The derivatives of single operations, each traced once.

JAX traces the rule of an operation's derivative anew whenever the operation is differentiated. That is little beside a
compilation, but where nothing is compiled it is most of what a gradient takes. Of jitted functions JAX keeps
derivatives and transposes; so here each operation is differentiated as a jitted function that does nothing else.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from replicax._jax.internals import ad as _ad, config as _config, core as _core
from replicax._jax.jaxprs.programs import enable_x64_for
from replicax._jax.jaxprs.types import Primitive, shape_of
from replicax.per_replica.eager.operation_keys import operation_key

OPERATION = "replicax_operation"
"""The name of these functions, and of their derivatives and transposes."""

_MOST = 16384  # operations that are kept
_calls: dict[Any, Any] = {}
_lock = threading.RLock()
_jaxs_rule = _ad.fallback_linearize_rule
"""Traces the rule of the derivative."""


def call_of(primitive: Primitive, avals: Sequence[Any], params: Any) -> Any:
    """An operation as a call of a jitted function, for operands of these kinds; ``None`` if there is no key for it."""
    operation = operation_key(primitive, params, avals)
    if operation is None:
        return None
    with _lock, jax.disable_jit(False), jax.default_device(None), _core.set_current_trace(_core.eval_trace):
        key = _config.trace_context(), operation  # without the device, which the settings name
        if key not in _calls:

            def bound(*operands: Any) -> Any:
                return primitive.bind(*operands, **params)

            bound.__name__ = OPERATION
            with enable_x64_for(avals):
                [call] = jax.make_jaxpr(jax.jit(bound))(*map(shape_of, avals)).eqns
            _calls[key] = None if call.effects else call
            while len(_calls) > _MOST:
                del _calls[next(iter(_calls))]
        return _calls[key]


def _linearized_operation(
    primitive: Primitive, is_vjp: Any, nonzeros: Sequence[bool], /, *operands: Any, **params: Any
) -> Any:
    jitted_call = getattr(_core.trace_ctx.trace, "jitted_call", None)  # a trace of ours computes
    call = None if jitted_call is None else jitted_call(primitive, operands, params)
    if call is None:
        return _jaxs_rule(primitive, is_vjp, nonzeros, *operands, **params)
    rule = _ad.primitive_linearizations[call.primitive]
    results, are_nonzero, *residuals, linear = rule(is_vjp, nonzeros, *operands, **call.params)
    if primitive.multiple_results:
        return results, are_nonzero, *residuals, linear
    return results[0], are_nonzero[0], *residuals, lambda *given: linear(*given)[0]


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
