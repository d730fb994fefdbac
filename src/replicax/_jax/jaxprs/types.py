"""The kinds of things that JAX's programs are made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.extend import core as _extend

Jaxpr = _extend.Jaxpr
# From JAX 0.12 on there is one class for both: a program with the constants that it has closed over, if any.
ClosedJaxpr: Any = _extend.ClosedJaxpr  # type: ignore[attr-defined, unused-ignore]
Equation = _extend.JaxprEqn
Literal = _extend.Literal
Primitive = _extend.Primitive
ShapedArray = jax.core.ShapedArray


def without_literals(atoms: Iterable[Any]) -> list[Any]:
    """The values among the operands of an equation, or the outputs of a program; others are numbers written there."""
    return [v for v in atoms if not isinstance(v, Literal)]


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """The description of a value of this kind, for tracing a program."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
