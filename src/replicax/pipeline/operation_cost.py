"""The cost of an operation: roughly how long it takes, to decide in which order things run."""

from __future__ import annotations

import math
from typing import Any

from replicax import _jax
from replicax._jax.primitive_families import SCANS


def cost_of(equation: Any) -> float:
    """Multiplications and additions of one run, or for want of these the number of elements of the results."""
    name, params = equation.primitive.name, equation.params
    inner = sum(sum(map(cost_of, program.eqns)) for program in _jax.sub_jaxprs(equation))
    elements = float(sum(math.prod(getattr(v.aval, "shape", ())) for v in equation.outvars))
    if name in SCANS:
        return float(_jax.scan_of(params).length) * inner
    if inner:
        return inner
    return float(_jax.product_flops(equation)) or elements
