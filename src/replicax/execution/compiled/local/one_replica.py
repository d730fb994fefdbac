"""One replica of a device, and what it does by itself while it is its turn."""

from __future__ import annotations

import math
from typing import Any

from replicax import _jax
from replicax._jax.operation_params import dims_along
from replicax.execution.compiled.local.entered_programs import BareWalk, enter
from replicax.execution.compiled.local.once_for_all import added_in_order, adds_up, is_entered
from replicax.execution.compiled.local.replica_stages import asks_for_position


class OneReplica(BareWalk):
    """Does what one replica does by itself; all that differs between replicas is in the values.

    Args:
      number: the replica's.
      on_cpu: whether it is for CPUs.
      in_order: whether sums have a fixed order. Then XLA on CPU leaves them to no library, and takes one element after
        the other where the rows of an array are added up, such as for the gradient of a bias; in an order of our own
        it adds up whole rows.
    """

    def __init__(self, number: Any, on_cpu: bool, in_order: bool = False) -> None:
        self.number = number
        self.by_rows = on_cpu and in_order

    def results(self, equation: _jax.Equation, operands: list[Any]) -> list[Any]:
        if asks_for_position(equation):
            return [self.number]
        if any(_jax.contains(inner, asks_for_position) for inner in _jax.sub_jaxprs(equation)):
            return enter(self, equation, operands)
        if self.by_rows:
            if _adds_rows(equation):
                return added_in_order(equation, operands[0])
            if is_entered(equation) and any(_jax.contains(inner, _adds_rows) for inner in _jax.sub_jaxprs(equation)):
                return enter(self, equation, operands)
        return _jax.bind(equation, operands)


def _adds_rows(equation: _jax.Equation) -> bool:
    """Whether it adds up the rows of an array."""
    if not adds_up(equation):
        return False
    [operand] = equation.invars
    shape = _shape(operand)
    dims = dims_along(equation.params, len(shape))
    return bool(dims) and max(dims) + 1 == len(dims) and math.prod(shape[len(dims) :]) >= _ROW


def _shape(atom: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = atom.aval.shape
    return shape


_ROW = 8  # elements: as many as a CPU adds at once
