"""The rules of locality for single operations, for both executors.

An operation without a rule joins its operands: a result may differ between replicas if one of its operands may.
Loops, branches and calls have programs inside, which :mod:`replicax.execution.program.infer` goes through.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replicax import _jax
from replicax._jax import primitive_families
from replicax.collectives import alone_p, gathered_p, share_p
from replicax.execution.program.marks import asks_p, assign_p, mark_p
from replicax.locality import Locality, M, R, T

ALWAYS: dict[str, Locality] = {
    alone_p.name: R,
    gathered_p.name: R,
    share_p.name: T,
    asks_p.name: M,  # answered once for all
}
"""Operations whose results have one locality, whatever their operands have."""

LOCALITY_KEPT = primitive_families.HANDED_ON | {mark_p.name, assign_p.name}
"""Operations each of whose results has the locality of the operand in its place."""


def result_localities(name: str, params: Mapping[str, Any], operands: Sequence[Locality], count: int) -> list[Locality]:
    """The localities of ``count`` results of an operation without programs inside, from those of its operands."""
    if name in ALWAYS:
        return [ALWAYS[name]] * count
    if not _jax.is_deterministic(name, params):
        return [T] * count
    if name in LOCALITY_KEPT:
        return list(operands)
    return [join(operands)] * count


def join(localities: Iterable[Locality]) -> Locality:
    """The locality of what is computed from values of these localities."""
    joined = M
    for locality in localities:
        joined = joined | locality
    return joined
