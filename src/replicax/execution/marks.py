"""Marks: questions asked while tracing, answered once the locality of every value is known.

Whether a value is the same on all replicas is not known while the step's Python runs. So a question such as
"this must be mirrored, because it is assigned to a mirrored variable" becomes a *mark* on the value: an
identity primitive with a number, which the pass in :mod:`replicax.execution.infer` finds wherever it ended up,
inside a loop or inside a gradient. In compiled code a mark is nothing at all.
"""

from __future__ import annotations

import dataclasses

from replicax import _jax
from replicax.locality import Locality


@dataclasses.dataclass(frozen=True, slots=True)
class Obligation:
    """What a mark asks for."""

    refused: frozenset[Locality]
    """What the marked value must not turn out to be."""
    otherwise: str
    """The error's text if it does."""


mark_p = _jax.identity_primitive("replicax_mark")
"""``y, … = mark[mark_id=i] x, …``: ``y`` is ``x``, and obligation ``i`` of the program is about it.

What comes after ``x`` is only tied to it: the mark is there as long as any of its results is used.
"""

variable_p = _jax.input_primitive("replicax_variable")
"""``y = variable[aval=a index=i]``: ``y`` is the value at the start of the step of the i-th variable it uses."""
