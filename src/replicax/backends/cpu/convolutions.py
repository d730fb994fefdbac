"""Convolutions in the order of dims for which XLA's CPU backend has fast code.

XLA brings the dims of a convolution into that order, but only at the top of a program. In a branch or loop, a gradient
by the filter takes many times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from replicax import _jax
from replicax._jax.primitive_families import CONTROL_FLOW, CONVOLUTIONS
from replicax.backends.cpu.rule import CPURule
from replicax.execution.compiled.backend import Target
from replicax.execution.compiled.program_rewriting import Rewriting


class Convolutions(CPURule):
    """The order of dims of convolutions in branches and loops."""

    def is_wanted(self, jaxpr: _jax.Jaxpr, target: Target) -> bool:
        return _jax.contains(jaxpr, self.is_ours if target.in_a_loop else self._is_inside)

    def _is_inside(self, equation: _jax.Equation) -> bool:
        return equation.primitive.name in CONTROL_FLOW and _jax.is_or_contains(equation, self.is_ours)

    def is_ours(self, equation: _jax.Equation) -> bool:
        if equation.primitive.name not in CONVOLUTIONS:
            return False
        order: lax.ConvDimensionNumbers = equation.params["dimension_numbers"]
        return order != _fast_order(len(order.lhs_spec))

    def replaced(self, equation: _jax.Equation, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        lhs, rhs, out = equation.params["dimension_numbers"]
        with _jax.from_line_of(equation):
            in_order = [
                lax.transpose(operands[0], (lhs[0], *lhs[2:], lhs[1])),
                lax.transpose(operands[1], (*rhs[2:], rhs[1], rhs[0])),
            ]
            params = {**equation.params, "dimension_numbers": _fast_order(len(lhs))}
            [result] = _jax.bind(equation, in_order, params)
            return [lax.transpose(result, _inverse((out[0], *out[2:], out[1])))]


def _inverse(dims: Sequence[int]) -> list[int]:
    return [dims.index(d) for d in range(len(dims))]


def _fast_order(n: int) -> lax.ConvDimensionNumbers:
    """The fast order of dims: examples, space, channels; of the filter space, input and output channels."""
    middle = tuple(range(1, n - 1))
    return lax.ConvDimensionNumbers((0, n - 1, *middle), (n - 1, n - 2, *range(n - 2)), (0, n - 1, *middle))
