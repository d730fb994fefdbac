"""Once for all: what a device computes once, as all of its replicas have it alike."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from replicax import _jax
from replicax._jax.operation_params import dims_along
from replicax._jax.primitive_families import SUMS
from replicax.devices.summation_order import elements_in_order
from replicax.execution.compiled.local.entered_programs import BareWalk, enter
from replicax.execution.compiled.local.local_sums import wide


class OnceForAll(BareWalk):
    """Does what all replicas would do alike.

    Args:
      in_order: whether elements are added up in an order that does not depend on how an array lies in memory: a norm
        then has the same bits where its operand is in pieces between steps, and where it is not.
    """

    def __init__(self, in_order: bool) -> None:
        self.in_order = in_order

    def results(self, equation: _jax.Equation, operands: list[Any]) -> list[Any]:
        if not self.in_order:
            return _jax.bind(equation, operands)
        if _adds_up(equation):
            array = jnp.asarray(operands[0])
            total = elements_in_order(wide(array), dims_along(equation.params, array.ndim))
            return [total.astype(array.dtype)]
        is_entered = _jax.control_flow_of(equation) is not None or _jax.called_program(equation) is not None
        if is_entered and any(_jax.contains(inner, _adds_up) for inner in _jax.sub_jaxprs(equation)):
            return enter(self, equation, operands)
        return _jax.bind(equation, operands)


def _adds_up(equation: _jax.Equation) -> bool:
    """Whether it adds up elements of an array, and rounds."""
    return equation.primitive.name in SUMS and jnp.issubdtype(_dtype(equation.invars[0]), jnp.inexact)


def _dtype(atom: Any) -> Any:
    return atom.aval.dtype
