"""Sums of narrow floats at which XLA's CPU backend fails, in float32: it would compute them so anyway."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from replicax import _jax
from replicax._jax.primitive_families import AXIS_ARITHMETIC
from replicax.backends.cpu.rule import CPURule
from replicax.collectives import all_reduce_p
from replicax.execution.compiled.backend import Target
from replicax.execution.compiled.program_rewriting import Rewriting


class NarrowSums(CPURule):
    """Sums of bfloat16 over the replicas, where some axes are automatic: XLA aborts the process at them."""

    def is_wanted(self, jaxpr: _jax.Jaxpr, target: Target) -> bool:
        return target.automatic

    def is_ours(self, equation: _jax.Equation) -> bool:
        if equation.primitive is not all_reduce_p and equation.primitive.name not in AXIS_ARITHMETIC:
            return False
        return any(_dtype(v) == jnp.bfloat16 for v in equation.invars)

    def replaced(self, equation: _jax.Equation, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        results = _jax.bind(equation, [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in operands])
        return [x.astype(_dtype(v)) for x, v in zip(results, equation.outvars, strict=True)]


def _dtype(atom: Any) -> Any:
    return getattr(atom.aval, "dtype", None)
