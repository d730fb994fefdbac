"""Marks: questions asked while tracing, answered once the locality of every value is known.

Whether a value is the same on all replicas is not known while the step's Python runs. So a question such as
"this must be mirrored, because it is assigned to a mirrored variable" becomes a *mark* on the value: an
identity primitive with a number, which the pass in :mod:`replicax.execution.program.infer` finds wherever it ended up,
inside a loop or inside a gradient. In compiled code a mark is nothing at all.

Other primitives tell or ask something about a value while it is traced: that it is a variable's value, that it
belongs on a certain logical device, and whether padding lies along one of its dims.
"""

from __future__ import annotations

import dataclasses

from replicax import _jax
from replicax.errors import UNKNOWN_LINE, LocalityError
from replicax.locality import Locality


@dataclasses.dataclass(frozen=True, slots=True)
class Obligation:
    """A condition on a marked value."""

    refused: frozenset[Locality]
    """The localities that the marked value must not have."""
    message: str
    """The text of the error if it has one of them."""
    is_loss: bool
    """Whether the marked value is a loss, and what is tied to it its gradients."""

    def check(self, locality: Locality, mark: _jax.Equation) -> None:
        """Raise a LocalityError if the marked value must not have this locality."""
        if locality in self.refused:
            line = _jax.source_line(mark)
            raise LocalityError(self.message + ("" if line == UNKNOWN_LINE else f"\n  at {line}"))


mark_p = _jax.identity_primitive("replicax_mark")
"""``y, … = mark[mark_id=i] x, …``: ``y`` is ``x``, and obligation ``i`` of the program is about it.

The further operands are only tied to ``x``: the mark stays as long as any of its results is used.
"""

variable_p = _jax.Primitive("replicax_variable")
variable_p.def_abstract_eval(lambda *, aval, **_: aval)
"""``y = variable[aval=a index=i]``: ``y`` is the value at the start of the step of the i-th variable it uses."""

assign_p = _jax.two_way_primitive("replicax_assign")
"""``y = assign[device=k number=n back=False] x``: ``y`` is ``x``, on logical device ``k``.

Transposed it is ``assign[… back=True]``: the cotangent goes back to where ``x`` was. In code that knows nothing of
places it is nothing at all. Each has a number of its own; see :mod:`replicax.pipeline.placement`.
"""


def assigns(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether a program assigns values to logical devices."""
    return _jax.contains(jaxpr, lambda equation: equation.primitive is assign_p)


replica_number_p = _jax.identity_primitive("replicax_replica_number")
"""``n = replica_number i``: ``n`` is ``i``, the replica's number in an iteration of a loop over a device's replicas.

Whatever such a loop carries is the same for all its replicas, or a sum over them that begins with zeros.
"""

asks_p = _jax.asking_primitive("replicax_asks", lambda x, *, question: question.ask(x))
"""``b = asks[question=q] x``: the answer to ``q``, a :class:`replicax.padding.questions.Question`, of ``x``.

In compiled code it is a constant, as the answer is found in the program.
"""
