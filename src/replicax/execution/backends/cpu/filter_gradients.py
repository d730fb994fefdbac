"""The gradients of convolutions by their filters, in ways that XLA on CPUs is quicker at.

Such a gradient is a convolution, too, with one operand as large as an image as its filter. Each element of the result
is a sum over all examples and places. XLA reads all of that operand again for each few elements of the result. So:

- With few elements of the filter for each channel of the result, or with a single place, as in 1×1 convolutions, it
  becomes a product of matrices, which XLA is quick at.
- Where the operand is larger than a core's own memory, it is divided by examples into parts that are not, and the
  convolutions with the parts are added up.

The order in which a sum is taken is another one then.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from replicax._jax import Equation
from replicax._jax.contractions import convolution_dimensions
from replicax.execution.backends.cpu.dim_orders import bind_in_fast_order, in_order

FEW = 32
"""Elements of the filter for each of its outputs, up to which a product of matrices is quicker."""
LEAST = 1 << 16
"""Elements of the larger operand, below which it does not matter."""
PART = 512 * 1024
"""Bytes of the operand that is divided, in each part: these are what stays close to a core."""
MOST_PARTS = 16


def is_slow_by_filter(equation: Equation) -> bool:
    """Whether a convolution is such a gradient, and is to be said in one of these ways."""
    return _is_product(equation) or _parts(equation) > 1


def bind_by_filter(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    """The result of such a convolution."""
    return [_product(equation, *operands) if _is_product(equation) else _sum_of_parts(equation, *operands)]


def _shapes(equation: Equation) -> tuple[Any, Any, Any]:
    first, second, result = (getattr(v.aval, "shape", ()) for v in (*equation.invars, *equation.outvars))
    return first, second, result


def _is_filter_gradient(equation: Equation) -> bool:
    """Whether a convolution is one of this kind: its filter is larger than its result, and all is in float32."""
    params = equation.params
    dims = convolution_dimensions(params)
    dtypes = [getattr(v.aval, "dtype", None) for v in (*equation.invars, *equation.outvars)]
    if dims.example_groups > 1 or dims.channel_groups > 1 or any(dtype != jnp.float32 for dtype in dtypes):
        return False
    _, second, result = _shapes(equation)
    rhs, out = params["dimension_numbers"][1:]
    places, shown = (math.prod(shape[d] for d in s[2:]) for shape, s in ((second, rhs), (result, out)))
    large = LEAST <= math.prod(second) > math.prod(result)
    return 0 < shown <= places and large and set(params["lhs_dilation"]) == {1}


def _is_product(equation: Equation) -> bool:
    if not _is_filter_gradient(equation):
        return False
    _, second, result = _shapes(equation)
    rhs, out = equation.params["dimension_numbers"][1:]
    inputs, places = result[out[0]], math.prod(result[d] for d in out[2:])
    return math.prod(second[d] for d in rhs[2:]) > 1 and (places == 1 or inputs * places <= FEW)


def _parts(equation: Equation) -> int:
    """Into how many parts the operand is divided."""
    if not _is_filter_gradient(equation):
        return 1
    _, second, result = _shapes(equation)
    size = 4 * math.prod(second)
    if size <= 2 * PART or 2 * math.prod(result) > math.prod(second):
        return 1
    examples = second[equation.params["dimension_numbers"][1][1]]
    return int(min(-(-size // PART), MOST_PARTS, examples))


def _product(equation: Equation, first: Any, second: Any) -> Any:
    """As a product of matrices: for each element of the filter the elements of the operand that it has met."""
    params = equation.params
    lhs, rhs, out = params["dimension_numbers"]
    x = lax.transpose(first, lhs)  # the inputs, the examples, places
    around = [(0, 0, 0), (0, 0, 0), *((low, high, 0) for low, high in params["padding"])]
    x = lax.optimization_barrier(lax.pad(x, x.dtype.type(0), around))
    steps, sizes = params["rhs_dilation"], [second.shape[d] for d in rhs[2:]]
    starts = itertools.product(*(range(0, stride * n, stride) for stride, n in _shown(equation)))
    met = []
    for start in starts:
        ends = [a + (n - 1) * step + 1 for a, n, step in zip(start, sizes, steps, strict=True)]
        met.append(lax.slice(x, (0, 0, *start), (*x.shape[:2], *ends), (1, 1, *steps)))
    inputs, examples = x.shape[:2]
    many = examples * math.prod(sizes)
    rows = lax.optimization_barrier(lax.reshape(jnp.stack(met), (len(met) * inputs, many)))
    columns = lax.reshape(lax.transpose(second, (rhs[1], *rhs[2:], rhs[0])), (many, second.shape[rhs[0]]))
    found = lax.dot_general(rows, columns, (((1,), (0,)), ((), ())), precision=params["precision"])
    apart = lax.reshape(found, (*(n for _, n in _shown(equation)), inputs, found.shape[-1]))
    return in_order(apart, (*out[2:], out[0], out[1]))


def _shown(equation: Equation) -> list[tuple[int, int]]:
    """For each dim of space, how far two elements of the result are apart in the operand, and how many there are."""
    result, out = _shapes(equation)[2], equation.params["dimension_numbers"][2]
    return list(zip(equation.params["window_strides"], (result[d] for d in out[2:]), strict=True))


def _sum_of_parts(equation: Equation, first: Any, second: Any) -> Any:
    lhs, rhs, _ = equation.params["dimension_numbers"]
    examples, parts = second.shape[rhs[1]], _parts(equation)
    bounds = [examples * i // parts for i in range(parts + 1)]
    found: Any = None
    for start, stop in itertools.pairwise(bounds):
        operands = [lax.slice_in_dim(x, start, stop, axis=d) for x, d in ((first, lhs[1]), (second, rhs[1]))]
        [part] = bind_in_fast_order(equation, operands)
        found = part if found is None else found + part
    return found
