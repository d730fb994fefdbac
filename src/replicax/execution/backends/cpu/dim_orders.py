"""The orders of dims for which XLA's CPU backend has fast code, of convolutions and of matrix products.

XLA brings the dims of a convolution into that order, but only at the top of a program. In a branch or loop, a gradient
by the filter takes many times as long.

A matrix product is fast if it sums over the last dim of the first operand and the first dim of the second. The gradient
by a weight sums over the first dims of both, which are those of the examples. XLA brings that into another order than
the fast one, and copies one operand element by element to do so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from replicax._jax import Equation, bind
from replicax.execution.backends.cpu.apart import turned_around


def is_in_fast_order(equation: Equation) -> bool:
    """Whether the dims of a convolution are in the order for which XLA on CPU has fast code."""
    order: lax.ConvDimensionNumbers = equation.params["dimension_numbers"]
    return order == _fast_order(len(order.lhs_spec))


def bind_in_fast_order(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    """The results of a convolution, which is made one with its dims in that order."""
    lhs, rhs, out = equation.params["dimension_numbers"]
    order = _fast_order(len(lhs))
    [result] = bind(
        equation,
        [
            lax.transpose(operands[0], (lhs[0], *lhs[2:], lhs[1])),
            lax.transpose(operands[1], (*rhs[2:], rhs[1], rhs[0])),
        ],
        {**equation.params, "dimension_numbers": order},
    )
    return [in_order(result, (out[0], *out[2:], out[1]))]


def in_order(array: Any, dims: Sequence[int]) -> Any:
    """An array whose dim ``i`` is to be ``dims[i]``."""
    return lax.transpose(array, [dims.index(d) for d in range(len(dims))])


WORTH_TURNING = 128
"""How many multiplications there are, at least, for each element that is turned around to make a product a fast one."""

FEWEST_EXAMPLES = 128
"""That such a product sums over: of fewer, the compiler's way is as quick."""


def is_slow_over_examples(equation: Equation) -> bool:
    """Whether a product of matrices sums over the first dims of both, and has enough to do to be made a fast one."""
    (lhs, rhs), (batch, _) = equation.params["dimension_numbers"]
    first, second, result = (getattr(v.aval, "dtype", None) for v in (*equation.invars, *equation.outvars))
    if (
        not tuple(lhs) == tuple(rhs) == tuple(range(len(lhs)))
        or batch
        or not _is_unsplit(equation.params["out_sharding"])
        or not first == second == result == jnp.float32
    ):
        return False
    examples, rows, columns = _matrix_sizes(equation)
    turned = min(_turned(examples, rows, columns).values())
    return (
        examples >= FEWEST_EXAMPLES and min(rows, columns) > 1 and WORTH_TURNING * turned <= examples * rows * columns
    )


def bind_over_inner_dims(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    """The result of such a product, which is made one over the last dim of one operand and the first of the other.

    The compiler would merge what is turned around with the product, which had the slow order again, or with what
    computes the operand, element by element in the wrong order. So it is compiled apart.
    """
    examples, rows, columns = _matrix_sizes(equation)
    lhs, rhs = lax.reshape(operands[0], (examples, rows)), lax.reshape(operands[1], (examples, columns))
    params = {**equation.params, "dimension_numbers": (((1,), (0,)), ((), ())), "out_sharding": None}
    turned = _turned(examples, rows, columns)
    swapped = turned["rhs"] <= turned["lhs"]
    a, b = (rhs, lhs) if swapped else (lhs, rhs)
    [result] = bind(equation, [turned_around(a), b], params)
    result = lax.optimization_barrier(result)
    result = lax.transpose(result, (1, 0)) if swapped else result
    return [lax.reshape(result, getattr(equation.outvars[0].aval, "shape", ()))]


def _is_unsplit(sharding: Any) -> bool:
    """Whether a product's result is split over no axis: inside a mesh, gradients say so of each dim."""
    return sharding is None or all(axis is None for axis in getattr(sharding, "spec", [sharding]))


def _turned(examples: int, rows: int, columns: int) -> dict[str, int]:
    """How many elements are turned around with each of the operands: JAX turns the result of the first, too.

    Gradients by weights are such products, with the weight's dims the other way round.
    """
    return {"lhs": examples * rows + rows * columns, "rhs": examples * columns}


def _matrix_sizes(equation: Equation) -> tuple[int, int, int]:
    """How many elements the operands of such a product have along the dims that it sums over, and each along others."""
    n = len(equation.params["dimension_numbers"][0][0])
    lhs, rhs = (getattr(v.aval, "shape", ()) for v in equation.invars)
    return math.prod(lhs[:n]), math.prod(lhs[n:]), math.prod(rhs[n:])


def _fast_order(n: int) -> lax.ConvDimensionNumbers:
    """Examples, space, channels; of the filter space, what it takes and what it gives."""
    middle = tuple(range(1, n - 1))
    return lax.ConvDimensionNumbers((0, n - 1, *middle), (n - 1, n - 2, *range(n - 2)), (0, n - 1, *middle))
