"""Convolutions and matrix products whose dims are in the order for which XLA's CPU backend has fast code."""

from __future__ import annotations

from typing import Any

from replicax import _jax
from replicax._jax.primitive_families import CONTROL_FLOW, CONVOLUTIONS, MATRIX_PRODUCTS
from replicax.execution.backends.cpu.dim_orders import (
    bind_in_fast_order,
    bind_over_inner_dims,
    is_in_fast_order,
    is_slow_over_examples,
)
from replicax.execution.backends.cpu.filter_gradients import bind_by_filter, is_slow_by_filter
from replicax.execution.backends.cpu.rule import CPURule
from replicax.execution.compiled.backend import Target
from replicax.execution.compiled.program_rewriting import Rewriting


class Convolutions(CPURule):
    """The order of dims of convolutions: in branches and loops, as XLA brings the others into it."""

    def is_wanted(self, jaxpr: _jax.Jaxpr, target: Target) -> bool:
        return _jax.contains(jaxpr, self.is_ours if target.in_a_loop else self._is_inside)

    def _is_inside(self, equation: _jax.Equation) -> bool:
        inner = _jax.sub_jaxprs(equation) if equation.primitive.name in CONTROL_FLOW else []
        return any(_jax.contains(program, self.is_ours) for program in inner)

    def is_ours(self, equation: _jax.Equation) -> bool:
        return equation.primitive.name in CONVOLUTIONS and not is_in_fast_order(equation)

    def replaced(self, equation: _jax.Equation, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        with _jax.from_line_of(equation):
            return bind_in_fast_order(equation, operands)


class WeightGradients(CPURule):
    """The gradients of matrix products by weights."""

    def is_ours(self, equation: _jax.Equation) -> bool:
        return equation.primitive.name in MATRIX_PRODUCTS and is_slow_over_examples(equation)

    def replaced(self, equation: _jax.Equation, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        with _jax.from_line_of(equation):
            return bind_over_inner_dims(equation, operands)


class FilterGradients(CPURule):
    """The gradients of convolutions by their filters."""

    def is_ours(self, equation: _jax.Equation) -> bool:
        return equation.primitive.name in CONVOLUTIONS and is_slow_by_filter(equation)

    def replaced(self, equation: _jax.Equation, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        with _jax.from_line_of(equation):
            return bind_by_filter(equation, operands)
