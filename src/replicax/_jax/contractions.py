"""Matrix products and convolutions: their dims, several as one, and the order of dims that XLA on CPU computes fast.

The sum of several products or convolutions is one with a longer contraction. XLA on CPU brings the dims of a
convolution into the one order for which it has fast code, but only of those at the top of a program. In a branch or
loop, a gradient by the filter takes many times as long.

A product of matrices is fast there if it sums over the last dim of the first operand and the first dim of the second.
The gradient by a weight sums over the first dims of both, which are those of the examples. XLA brings that into another
order than the fast one, and copies one operand element by element to do so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from replicax._jax.cpu.apart import turned_around
from replicax._jax.jaxprs.programs import bind
from replicax._jax.primitive_families import CONVOLUTIONS, MATRIX_PRODUCTS
from replicax._jax.types import Equation


@dataclasses.dataclass(frozen=True, slots=True)
class ConvolutionDimensions:
    """Which dims of a convolution's operands and result are which; the others are those of space.

    Attributes:
      examples: in the operand, that of the examples.
      channels: in the operand, that of the channels.
      filter_inputs: in the filter, that of the operand's channels.
      filter_outputs: in the filter, that of the result's channels.
      result_examples: in the result, that of the examples.
      example_groups: how many groups of examples there are, each with channels of the result to itself.
      channel_groups: how many groups of the operand's channels there are, each likewise.
    """

    examples: int
    channels: int
    filter_inputs: int
    filter_outputs: int
    result_examples: int
    example_groups: int
    channel_groups: int


def convolution_dimensions(params: Mapping[str, Any]) -> ConvolutionDimensions:
    """Those of a convolution with these params."""
    lhs, rhs, out = params["dimension_numbers"]
    groups = params["batch_group_count"], params["feature_group_count"]
    return ConvolutionDimensions(lhs[0], lhs[1], rhs[1], rhs[0], out[0], *groups)


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


def sums_up(equation: Equation) -> bool:
    """Whether the sum of several such operations is one of them."""
    if equation.primitive.name in CONVOLUTIONS:
        dims = convolution_dimensions(equation.params)
        return dims.example_groups == dims.channel_groups == 1
    return equation.primitive.name in MATRIX_PRODUCTS


def summed_up(equation: Equation, lhs: Any, rhs: Any, dtype: Any, *, on_cpu: bool) -> Any:
    """The sum of a matrix product or convolution of ``lhs[i]`` and ``rhs[i]`` over all ``i``, as one operation.

    Args:
      equation: the operation.
      lhs: the first operand of each, one after the other along a dim in front.
      rhs: the second operands, likewise.
      dtype: of the sum.
      on_cpu: whether it is for CPUs.
    """
    params = {**equation.params, "preferred_element_type": jnp.dtype(dtype)}
    if on_cpu:  # which has no products of narrow floats with a wide result
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
    if equation.primitive.name in MATRIX_PRODUCTS:
        (a, b), batch = ([[d + 1 for d in dims] for dims in pair] for pair in params["dimension_numbers"])
        params["dimension_numbers"] = (((0, *a), (0, *b)), tuple(map(tuple, batch)))
        return bind(equation, [lhs, rhs], params)[0]
    dims = convolution_dimensions(params)
    operands = [_merged(lhs, dims.channels), _merged(rhs, dims.filter_inputs)]
    return bind(equation, operands, params)[0]


def _merged(array: Any, dim: int) -> Any:
    """``array[i]`` one after the other along one of their dims."""
    apart = jnp.moveaxis(array, 0, dim)
    return lax.reshape(apart, (*apart.shape[:dim], apart.shape[dim] * apart.shape[dim + 1], *apart.shape[dim + 2 :]))
