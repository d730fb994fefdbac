"""The kinds of things that JAX's programs are made of."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import core as _core  # what jax.extend.core hands on: jax.extend loads Pallas, which takes 25 ms

Jaxpr = _core.Jaxpr
# From JAX 0.12 on there is one class for both: a program with the constants that it has closed over, if any.
ClosedJaxpr: Any = getattr(_core, "ClosedJaxpr", _core.Jaxpr)
Equation = _core.JaxprEqn
Literal = _core.Literal
Primitive = _core.Primitive
ShapedArray = jax.core.ShapedArray


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """What stands for a value of this kind while a program is traced."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
