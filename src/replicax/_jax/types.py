"""The kinds of things that JAX's programs are made of."""

from __future__ import annotations

import jax
from jax._src import core as _core  # what jax.extend.core hands on: jax.extend loads Pallas, which takes 25 ms

Jaxpr = _core.Jaxpr
ClosedJaxpr = _core.ClosedJaxpr
Equation = _core.JaxprEqn
Literal = _core.Literal
Primitive = _core.Primitive
ShapedArray = jax.core.ShapedArray
