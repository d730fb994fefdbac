"""The evaluation of a step operation by operation, each of which can be watched."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from replicax._jax.control_flow import hides, solving
from replicax._jax.internals import core as _core
from replicax._jax.jaxprs.types import ClosedJaxpr, Primitive
from replicax._jax.primitive_families import (
    BATCHING_CALLS,
    BRANCHES,
    CHECKPOINTS,
    LINEAR_SOLVES,
    WHILE_LOOPS,
    by_primitive,
)
from replicax._jax.primitives import computed_by_python
from replicax._jax.traces import of_no_generation
from replicax.per_replica.eager.derivatives import derivative_of
from replicax.per_replica.eager.library_functions import run_as_one
from replicax.per_replica.eager.linear_maps import linear_p
from replicax.per_replica.eager.operations import Operations

program_p = Primitive("replicax_program")
"""The operation that ``watch`` gets for a whole program, its param ``program``."""


class EagerTrace(_core.EvalTrace):
    """Computes as if nothing were being traced, on one device, with operations that all devices share."""

    def __init__(self, device: jax.Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = Operations(device)

    def apply(self, function: Callable[..., Any], args: Sequence[Any]) -> list[Any] | None:
        """The results of ``function`` as one program, which is cached by it; ``None`` if it can't be compiled."""
        with of_no_generation():
            return self._operations.apply(function, args)

    def process_primitive(self, primitive: Primitive, args: Any, params: Any, /) -> Any:
        with of_no_generation():
            results = self._operations.compute(primitive, args, params)
            if results is None and not all(map(self._operations.has, args)):
                args = [self._operations.brought(arg) for arg in args]
                results = self._operations.compute(primitive, args, params)
            if results is None:
                return super().process_primitive(primitive, args, params)  # type: ignore[no-untyped-call]
        return results if primitive.multiple_results else results[0]


class WatchingTrace(EagerTrace):
    """Tells ``watch`` of each operation and its results.

    Args:
      watch: called with the operation, its operands, params and results.
      device: where to compute.
      each: whether ``watch`` must see each operation of a derivative. Otherwise these are computed together, and
        ``watch`` gets each of their results, with the operands from which it was computed.
    """

    def __init__(
        self, watch: Callable[[Primitive, Sequence[Any], Any, Sequence[Any]], None], device: jax.Device, each: bool
    ) -> None:
        super().__init__(device)
        self._watch = watch
        self._each = each

    def linearize(
        self, rule: Callable[..., Any], primitive: Primitive, nonzeros: Sequence[bool], args: Any, params: Any
    ) -> Any:
        """The results of an operation, and its derivative; ``None`` if JAX is to find it, operation by operation."""
        if self._each:
            return None
        with of_no_generation():
            derivative = derivative_of(self._operations, primitive, rule, nonzeros, args, params)
            if derivative is None:
                return None
            results = self._operations.apply(derivative.compute, args) if derivative.needs else []
        if results is None:
            return None
        for result, needs in zip(results, derivative.needs, strict=True):
            self._watch(primitive, [args[i] for i in needs], params, [result])
        return derivative.linearized(args, results)

    def compute_as_one_program(self, fn: Callable[..., Any], of: Callable[..., Any], args: Any) -> Any:
        """The results of a library's function; see :func:`replicax._jax.as_one_program`."""
        return run_as_one(self.compute_program, fn, of, args)

    def compute_program(self, program: ClosedJaxpr, args: Sequence[Any]) -> list[Any] | None:
        """The results of a library's program; ``None`` if its operations must be computed one by one."""
        return self._computed_results(program, args)

    def _computed_results(self, program: ClosedJaxpr, args: Sequence[Any]) -> list[Any] | None:
        with of_no_generation():
            results = None if self._each else self._operations.compute_program(program, args)
        if results is not None:
            self._watch(program_p, args, {"program": program.jaxpr}, results)
        return results

    def process_primitive(self, primitive: Primitive, args: Any, params: Any, /) -> Any:
        if primitive is linear_p:
            results = self._computed_results(params["map"].program, args)
            if results is not None:
                return results
        evaluate = _STEP_BY_STEP.get(primitive.name)
        if evaluate is None and hides(primitive, params, lambda inner: inner.primitive in computed_by_python):
            evaluate = functools.partial(_of_a_library, primitive)
        if evaluate is not None:
            with _core.set_current_trace(self):
                return evaluate(list(args), params)
        results = super().process_primitive(primitive, args, params)
        self._watch(primitive, args, params, results if primitive.multiple_results else [results])
        return results

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **_: Any) -> Any:
        with _core.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_custom_vjp_call(self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **_: Any) -> Any:
        with _core.set_current_trace(self):
            return fun.call_wrapped(*tracers)


# ``jax.checkpoint`` and ``custom_vmap`` make programs, even where nothing is compiled. These may have branches and
# loops inside, which JAX would compile. (It has unrolled scans and inlined calls.)


def _call(program: Any, args: Sequence[Any]) -> list[Any]:
    return list(jax.core.eval_jaxpr(getattr(program, "jaxpr", program), getattr(program, "consts", ()), *args))


def _of_a_library(primitive: Primitive, args: list[Any], params: Any) -> Any:
    return primitive.impl(*args, **params)


def _branch(args: list[Any], params: Any) -> list[Any]:
    return _call(params["branches"][int(args[0])], args[1:])


def _while(args: list[Any], params: Any) -> list[Any]:
    n_test, n_body = params["cond_nconsts"], params["body_nconsts"]
    test, body, state = args[:n_test], args[n_test : n_test + n_body], args[n_test + n_body :]
    while (going := np.asarray(_call(params["cond_jaxpr"], [*test, *state])[0])).any():
        new = _call(params["body_jaxpr"], [*body, *state])
        # In a loop under jax.vmap each row goes on until its own test fails.
        state = [_selected_rows(going, a, b) for a, b in zip(new, state, strict=True)] if going.ndim else new
    return state


def _selected_rows(rows: Any, new: Any, old: Any) -> Any:
    return jax.lax.select(jax.lax.broadcast_in_dim(rows, new.shape, range(rows.ndim)), new, old)


_STEP_BY_STEP: Mapping[str, Callable[[list[Any], Any], list[Any]]] = by_primitive(
    {
        CHECKPOINTS: lambda args, params: _call(params["jaxpr"], args),
        BATCHING_CALLS: lambda args, params: _call(params["call"], args),
        LINEAR_SOLVES: lambda args, params: _call(*solving(params, args)),
        BRANCHES: _branch,
        WHILE_LOOPS: _while,
        frozenset({linear_p.name}): lambda args, params: params["map"](*args),
    }
)
