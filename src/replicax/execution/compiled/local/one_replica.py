"""One replica of a device, and what it does by itself while it is its turn."""

from __future__ import annotations

from typing import Any

from replicax import _jax
from replicax.execution.compiled.local.entered_programs import BareWalk, enter
from replicax.execution.compiled.local.replica_stages import asks_for_position


class OneReplica(BareWalk):
    """Does what one replica does by itself; all that differs between replicas is in the values.

    Args:
      number: the replica's.
    """

    def __init__(self, number: Any) -> None:
        self.number = number

    def results(self, equation: _jax.Equation, operands: list[Any]) -> list[Any]:
        if asks_for_position(equation):
            return [self.number]
        if any(_jax.contains(inner, asks_for_position) for inner in _jax.sub_jaxprs(equation)):
            return enter(self, equation, operands)
        return _jax.bind(equation, operands)
