"""Matrix products and convolutions: their dims, and the sum of several as one with a longer contraction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from replicax._jax.jaxprs.programs import bind
from replicax._jax.jaxprs.types import Equation
from replicax._jax.operation_params import dot_dimensions
from replicax._jax.primitive_families import CONVOLUTIONS, MATRIX_PRODUCTS


@dataclasses.dataclass(frozen=True, slots=True)
class ConvolutionDimensions:
    """The roles of the dims of a convolution's operands and result; the others are spatial."""

    examples: int  # in the operand, that of the examples
    channels: int  # in the operand, that of the channels
    filter_inputs: int  # in the filter, that of the operand's channels
    filter_outputs: int  # in the filter, that of the result's channels
    result_examples: int  # in the result, that of the examples
    example_groups: int  # how many groups of examples there are, each with channels of the result to itself
    channel_groups: int  # how many groups of the operand's channels there are, each likewise


def convolution_dimensions(params: Mapping[str, Any]) -> ConvolutionDimensions:
    """The roles of the dims of a convolution with these params."""
    lhs, rhs, out = params["dimension_numbers"]
    groups = params["batch_group_count"], params["feature_group_count"]
    return ConvolutionDimensions(lhs[0], lhs[1], rhs[1], rhs[0], out[0], *groups)


def product_flops(equation: Equation) -> int:
    """The multiplications and additions of a matrix product or convolution; 0 for any other operation."""
    name, params = equation.primitive.name, equation.params
    elements = math.prod(_shape(equation.outvars[0])) if equation.outvars else 0
    if name in MATRIX_PRODUCTS:
        contracted, _ = dot_dimensions(params).contracted
        return 2 * elements * math.prod(_shape(equation.invars[0])[d] for d in contracted)
    if name in CONVOLUTIONS:
        kernel = list(_shape(equation.invars[1]))
        del kernel[convolution_dimensions(params).filter_outputs]
        return 2 * elements * math.prod(kernel)
    return 0


def _shape(value: Any) -> tuple[int, ...]:
    return getattr(value.aval, "shape", ())


def sums_up(equation: Equation) -> bool:
    """Return whether the sum of several such operations is one of them."""
    if equation.primitive.name in CONVOLUTIONS:
        dims = convolution_dimensions(equation.params)
        return dims.example_groups == dims.channel_groups == 1
    return equation.primitive.name in MATRIX_PRODUCTS


def summed_up(equation: Equation, lhs: Any, rhs: Any, dtype: Any) -> Any:
    """The sum of a matrix product or convolution of ``lhs[i]`` and ``rhs[i]`` over all ``i``, as one operation.

    ``equation`` is the operation on one pair. The sum has the ``dtype``.
    """
    params = {**equation.params, "preferred_element_type": jnp.dtype(dtype)}
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
