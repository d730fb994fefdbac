"""Matrix products and convolutions: sums of several, which are one with a longer contraction."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from replicax._jax.convolutions import bind_in_branch, convolution_dimensions
from replicax._jax.primitive_families import CONVOLUTIONS, MATRIX_PRODUCTS
from replicax._jax.programs import bind
from replicax._jax.types import Equation


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
    return (bind_in_branch if on_cpu else bind)(equation.replace(params=params), operands)[0]


def _merged(array: Any, dim: int) -> Any:
    """``array[i]`` one after the other along one of their dims."""
    apart = jnp.moveaxis(array, 0, dim)
    return lax.reshape(apart, (*apart.shape[:dim], apart.shape[dim] * apart.shape[dim + 1], *apart.shape[dim + 2 :]))
