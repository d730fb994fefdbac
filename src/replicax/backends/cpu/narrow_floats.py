"""Operations on narrow floats that XLA's CPU backend fails at, in float32: it would compute them so anyway."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from replicax import _jax
from replicax._jax.primitive_families import AXIS_ARITHMETIC, CONVOLUTIONS, MATRIX_PRODUCTS
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


class NarrowProducts(CPURule):
    """Matrix products and convolutions of narrow floats with a wide result, for which XLA has no code everywhere.

    They arise where replicas that share a device add up their gradients.
    """

    def is_wanted(self, jaxpr: _jax.Jaxpr, target: Target) -> bool:
        return _jax.contains(jaxpr, lambda equation: _is_product(equation) and _is_narrow(equation.invars[0]))

    def is_ours(self, equation: _jax.Equation) -> bool:
        [result] = equation.outvars if _is_product(equation) else [None]
        return result is not None and _is_narrow(equation.invars[0]) and _dtype(result) == jnp.float32

    def replaced(self, equation: _jax.Equation, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        return _jax.bind(equation, [x.astype(jnp.float32) for x in operands])


def _is_product(equation: _jax.Equation) -> bool:
    return equation.primitive.name in MATRIX_PRODUCTS | CONVOLUTIONS


def _is_narrow(atom: Any) -> bool:
    return _dtype(atom) in (jnp.bfloat16, jnp.float16)


def _dtype(atom: Any) -> Any:
    return getattr(atom.aval, "dtype", None)
