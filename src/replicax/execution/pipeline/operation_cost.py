"""The cost of an operation: roughly how long it takes, to decide in which order things run."""

from __future__ import annotations

import math
from typing import Any

from replicax import _jax


def cost_of(equation: Any) -> float:
    """Multiplications and additions of one run, or for want of these the number of elements of the results."""
    name, params = equation.primitive.name, equation.params
    inner = sum(sum(map(cost_of, program.eqns)) for program in _jax.sub_jaxprs(equation))
    elements = float(sum(math.prod(getattr(v.aval, "shape", ())) for v in equation.outvars))
    if name == "scan":
        return float(_jax.scan_of(params).length) * inner
    if inner:
        return inner
    if name == "dot_general":
        contracted = params["dimension_numbers"][0][0]
        return 2 * elements * math.prod(equation.invars[0].aval.shape[d] for d in contracted)
    if name == "conv_general_dilated":
        kernel, numbers = equation.invars[1].aval.shape, params["dimension_numbers"]
        return 2 * elements * math.prod(kernel) / kernel[numbers.rhs_spec[0]]
    return elements
