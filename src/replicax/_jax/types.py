"""The kinds of things that JAX's programs are made of."""

from __future__ import annotations

import jax
from jax.extend import core as _extend

Jaxpr = _extend.Jaxpr
ClosedJaxpr = _extend.ClosedJaxpr
Equation = _extend.JaxprEqn
Literal = _extend.Literal
Primitive = _extend.Primitive
ShapedArray = jax.core.ShapedArray
