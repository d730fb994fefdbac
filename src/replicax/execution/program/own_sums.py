"""Sums of the replicas' own values, of which some may have been reduced already: those are taken as they are.

Whether a value has been reduced is known only when the whole step has been traced. So such a sum is recorded as a
primitive of its own, and becomes an all-reduce of the values that have not been.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from replicax import _jax
from replicax.collectives import all_reduce_p, gathered_p, own_sum_p
from replicax.execution.program.infer import localities_of
from replicax.locality import Locality, R


def with_all_reduces(jaxpr: _jax.Jaxpr, inputs: Sequence[Locality]) -> _jax.Jaxpr:
    """``jaxpr`` with an all-reduce for each :data:`~replicax.collectives.own_sum_p`, of what has not been reduced."""
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
