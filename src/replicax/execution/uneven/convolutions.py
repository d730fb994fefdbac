"""Convolutions as XLA on CPU computes them fast wherever they stand.

XLA on CPU brings the dims of a convolution into the one order for which it has fast code, but only of those at the top
of a program. In a branch or loop, a gradient by the filter is 20 times slower. So there the order is made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from replicax import _jax


def bind_in_branch(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of an operation, which stands in a branch or loop of a program for the CPU."""
    if equation.primitive.name != "conv_general_dilated":
        return _jax.bind(equation, operands)
    lhs, rhs, out = equation.params["dimension_numbers"]
    n = len(lhs)
    middle = tuple(range(1, n - 1))
    order = lax.ConvDimensionNumbers((0, n - 1, *middle), (n - 1, n - 2, *range(n - 2)), (0, n - 1, *middle))
    [result] = _jax.bind(
        equation,
        [
            lax.transpose(operands[0], (lhs[0], *lhs[2:], lhs[1])),
            lax.transpose(operands[1], (*rhs[2:], rhs[1], rhs[0])),
        ],
        {**equation.params, "dimension_numbers": order},
    )
    back = [0] * n
    for position, dim in zip(out, (0, n - 1, *middle), strict=True):
        back[position] = dim
    return [lax.transpose(result, back)]
