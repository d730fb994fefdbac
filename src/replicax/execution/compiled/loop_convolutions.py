"""Convolutions in loops and branches, in the order of dims for which XLA has fast code on CPUs.

XLA on CPU brings the dims of a convolution into that order only at the top of a program. In the body of a loop or in a
branch a gradient by the filter was up to 20 times slower; and a body is where many steps in one dispatch, several
replicas on a device, and uneven batches have theirs. So there the order is made here.
"""

from __future__ import annotations

from typing import Any

from replicax import _jax
from replicax._jax.contractions import bind_in_fast_order, is_in_fast_order
from replicax._jax.primitive_families import CONTROL_FLOW
from replicax.execution.compiled.replacement import Replacement


class LoopConvolutions(Replacement):
    """The pass over a program for CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self._bodies = _Body()

    def is_ours(self, equation: _jax.Equation) -> bool:
        return equation.primitive.name in CONTROL_FLOW and any(map(self._bodies.concerns, _jax.sub_jaxprs(equation)))

    def instead(self, equation: _jax.Equation, operands: list[Any]) -> list[Any]:
        return self._bodies.inside(equation, operands)


class _Body(Replacement):
    """The pass over the body of a loop, or over a branch."""

    def is_ours(self, equation: _jax.Equation) -> bool:
        return not is_in_fast_order(equation)

    def instead(self, equation: _jax.Equation, operands: list[Any]) -> list[Any]:
        return bind_in_fast_order(equation, operands)
