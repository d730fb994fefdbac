"""Linear maps: programs that are linear in some of their operands, as single operations.

The derivative of an operation is such a map, and so is its transpose. JAX would transpose it operation by operation at
each gradient; here it is transposed once, and is one program both ways.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad as _ad, batching as _batching, mlir as _mlir

from replicax._jax.internals import config as _config, core as _core
from replicax._jax.jaxprs.programs import enable_x64_as_in
from replicax._jax.jaxprs.types import ClosedJaxpr, Jaxpr, Primitive, shape_of
from replicax._jax.traces import of_no_generation


class LinearMap:
    """A linear program without constants."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.program = ClosedJaxpr(jaxpr, ())
        self._transposes: dict[Any, LinearMap] = {}
        self._lock = threading.RLock()

    def __call__(self, *operands: Any) -> list[Any]:
        """The results, computed operation by operation."""
        return list(jax.core.eval_jaxpr(self.program.jaxpr, (), *operands, propagate_source_info=False))

    def bind(self, operands: Sequence[Any]) -> list[Any]:
        """The results, computed at once where possible."""
        if not self.program.jaxpr.eqns:
            return self(*operands)
        return linear_p.bind(*operands, map=self)

    def transpose(self, is_linear: Sequence[bool], is_nonzero: Sequence[bool]) -> LinearMap:
        """The map from other operands, and cotangents of results that aren't zero, to those of linear operands."""
        with of_no_generation(), jax.disable_jit(False), jax.default_device(None):
            key = tuple(is_linear), tuple(is_nonzero), _config.trace_context()
            if key not in self._transposes:
                x64 = enable_x64_as_in(self.program.jaxpr)
                with self._lock, _core.set_current_trace(_core.eval_trace), x64:
                    self._transposes[key] = self._transposed_map(is_linear, is_nonzero)
            return self._transposes[key]

    def _transposed_map(self, is_linear: Sequence[bool], is_nonzero: Sequence[bool]) -> LinearMap:
        operands = [shape_of(a) for a in self.program.in_avals]
        results = self.program.out_avals
        linear = [a for a, is_ in zip(operands, is_linear, strict=True) if is_]
        others = [a for a, is_ in zip(operands, is_linear, strict=True) if not is_]
        cotangents = [shape_of(a.to_ct_aval()) for a, nonzero in zip(results, is_nonzero, strict=True) if nonzero]

        def apply(others: Any, cotangents: Any) -> Any:
            def forward(*linear: Any) -> list[Any]:
                rest, own = iter(others), iter(linear)
                return self(*(next(own) if is_ else next(rest) for is_ in is_linear))

            nonzeros = iter(cotangents)
            everyone = [
                next(nonzeros) if nonzero else jnp.zeros(a.shape, a.to_ct_aval().dtype)
                for a, nonzero in zip(results, is_nonzero, strict=True)
            ]
            return jax.linear_transpose(forward, *linear)(everyone)

        program = jax.make_jaxpr(apply)(others, cotangents)
        assert not program.consts
        return LinearMap(program.jaxpr)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, map: LinearMap) -> Any:
    return jax.jvp(map, tuple(primals), tuple(_ad.instantiate_zeros(t) for t in tangents))


def _batched_results(args: Sequence[Any], dims: Sequence[Any], *, map: LinearMap) -> Any:
    results = jax.vmap(map, in_axes=list(dims))(*args)
    return results, [0] * len(results)


def _transpose(cotangents: Sequence[Any], *operands: Any, map: LinearMap) -> list[Any]:
    is_linear = [_ad.is_undefined_primal(x) for x in operands]
    is_nonzero = [type(ct) is not _ad.Zero for ct in cotangents]
    others = [x for x, is_ in zip(operands, is_linear, strict=True) if not is_]
    nonzeros = [ct for ct in cotangents if type(ct) is not _ad.Zero]
    results = iter(map.transpose(is_linear, is_nonzero).bind([*others, *nonzeros]))
    return [next(results) if is_ else None for is_ in is_linear]


linear_p = Primitive("replicax_linear")
"""``y, … = linear[map=m] x, …``: the results of the :class:`LinearMap` ``m``."""

linear_p.multiple_results = True
linear_p.def_impl(lambda *operands, map: map(*operands))
linear_p.def_abstract_eval(lambda *_, map: list(map.program.out_avals))
_mlir.register_lowering(linear_p, _mlir.lower_fun(lambda *operands, map: map(*operands), multiple_results=True))
_ad.primitive_jvps[linear_p] = _jvp
_ad.primitive_transposes[linear_p] = _transpose
_batching.primitive_batchers[linear_p] = _batched_results
