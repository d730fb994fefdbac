"""Marks: questions asked while tracing, answered once the locality of every value is known.

Whether a value is the same on all replicas is not known while the step's Python runs. So a question such as
"this must be mirrored, because it is assigned to a mirrored variable" becomes a *mark* on the value: an
identity primitive with a number, which the pass in :mod:`replicax.execution.infer` finds wherever it ended up,
inside a loop or inside a gradient. In compiled code a mark is nothing at all.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from replicax import _jax


class Locality(enum.Enum):
    """Whether replicas may differ in a value.

    The pass joins localities: a result is per-replica if any operand is.

    >>> from replicax.execution import Locality
    >>> Locality.MIRRORED | Locality.PER_REPLICA
    <Locality.PER_REPLICA: 'T'>
    """

    MIRRORED = "M"
    """The same on every replica."""
    PER_REPLICA = "T"
    """It may differ between replicas."""

    def __or__(self, other: Locality) -> Locality:
        return Locality.PER_REPLICA if Locality.PER_REPLICA in (self, other) else Locality.MIRRORED


M, T = Locality.MIRRORED, Locality.PER_REPLICA


@dataclasses.dataclass(frozen=True, slots=True)
class Obligation:
    """What a mark asks for."""

    expected: Locality
    otherwise: str
    """The error's text if the value turns out to be of the other locality."""


mark_p = _jax.identity_primitive("replicax_mark")
"""``y = mark[mark_id=i] x``: ``y`` is ``x``, and obligation ``i`` of the program is about it."""

variable_p = _jax.input_primitive("replicax_variable")
"""``y = variable[aval=a index=i]``: ``y`` is the value at the start of the step of the i-th variable it uses."""


def mark(value: Any, mark_id: int) -> Any:
    """``value``, marked."""
    return mark_p.bind(value, mark_id=mark_id)
