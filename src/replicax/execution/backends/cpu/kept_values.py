"""Kept values: what XLA on CPUs would compute anew in each place that uses it.

It merges elementwise operations with whatever uses their results, and computes them in each of several uses. That is
quick where a value comes from few others. But what goes past many layers, as a residual connection and its gradient do,
is a sum of what each of them adds; then each use reads all of that again, more of it with each layer. So what is
computed from several arrays, and is used several times, is to be in memory.
"""

from __future__ import annotations

import collections
from typing import Any

from replicax import _jax
from replicax._jax.primitive_families import BROADCASTS, ELEMENTWISE, RESHAPES, SQUEEZES
from replicax.execution.backends.cpu.apart import kept
from replicax.execution.backends.cpu.rule import CPURule
from replicax.execution.compiled.backend import Target
from replicax.execution.compiled.program_rewriting import Rewriting

FEWEST_ELEMENTS = 16384
"""Of a value that is worth it: that it's written, and a function called for it, takes some microseconds."""

FEWEST_ARRAYS = 3
"""That such a value is computed from: each as large as that."""

FEWEST_OPERATIONS = 6
"""That such a value takes, from those arrays."""

_MERGED = ELEMENTWISE | BROADCASTS | RESHAPES | SQUEEZES


class KeptValues(CPURule):
    """Results that are to be in memory."""

    def __init__(self) -> None:
        self._values: set[Any] = set()

    def is_found(self, jaxpr: _jax.Jaxpr, target: Target) -> bool:
        return has_kept_values(jaxpr)

    def enter(self, jaxpr: _jax.Jaxpr) -> None:
        self._values |= kept_values(jaxpr)

    def is_ours(self, equation: _jax.Equation) -> bool:
        return not self._values.isdisjoint(equation.outvars)

    def replaced(self, equation: _jax.Equation, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        return [kept(result) for result in _jax.bind(equation, operands)]


def kept_values(jaxpr: _jax.Jaxpr) -> set[Any]:
    """The results of a program's operations that are to be in memory, but not of programs inside it."""
    uses = collections.Counter(v for e in jaxpr.eqns for v in set(filter(_is_value, e.invars)))
    uses.update(filter(_is_value, jaxpr.outvars))
    # Of what is computed elementwise: in how many operations, and from which arrays.
    origins: dict[Any, tuple[int, frozenset[Any]]] = {}
    found: set[Any] = set()
    for e in jaxpr.eqns:
        if e.primitive.name not in _MERGED:
            continue
        [result] = e.outvars
        before = [origins.get(v, (0, frozenset([v] if _is_large(v) else []))) for v in e.invars if _is_value(v)]
        operations, arrays = 1 + sum(n for n, _ in before), frozenset().union(*(some for _, some in before))
        is_costly = operations >= FEWEST_OPERATIONS and len(arrays) >= FEWEST_ARRAYS
        if is_costly and uses[result] > 1 and e.primitive.name in ELEMENTWISE and _is_large(result):
            found.add(result)
        else:
            origins[result] = operations, arrays
    return found


def has_kept_values(jaxpr: _jax.Jaxpr) -> bool:
    """Whether there are such in a program, or in one inside it."""
    return bool(kept_values(jaxpr)) or any(has_kept_values(p) for e in jaxpr.eqns for p in _jax.sub_jaxprs(e))


def _is_value(atom: Any) -> bool:
    return not isinstance(atom, _jax.Literal)


def _is_large(variable: Any) -> bool:
    return getattr(variable.aval, "size", 0) >= FEWEST_ELEMENTS
