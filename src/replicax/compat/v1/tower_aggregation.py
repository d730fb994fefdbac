"""``VariableAggregation``: how the towers' values become one."""

from __future__ import annotations

import enum
from typing import Any

from replicax.variables.aggregation import Aggregation


class VariableAggregation(enum.Enum):
    """How the towers' values become one; here it is :class:`replicax.Aggregation`, and strings name it, too.

    >>> from replicax.compat import v1
    >>> v1.VariableAggregation.ONLY_FIRST_TOWER.aggregation
    <Aggregation.ONLY_FIRST_REPLICA: 'only_first_replica'>
    """

    NONE = "none"
    """``replicax.Aggregation.NONE``: not at all."""
    SUM = "sum"
    """``replicax.Aggregation.SUM``: added up."""
    MEAN = "mean"
    """``replicax.Aggregation.MEAN``: averaged."""
    ONLY_FIRST_TOWER = "only_first_tower"
    """``replicax.Aggregation.ONLY_FIRST_REPLICA``: tower 0's."""

    @property
    def aggregation(self) -> Aggregation:
        """The :class:`replicax.Aggregation` that it is."""
        return Aggregation[self.name.replace("TOWER", "REPLICA")]


def parse(aggregation: Any, what: str, none: bool = False) -> VariableAggregation:
    """The aggregation that is meant: a member, its name in any case, or the core's.

    Args:
      aggregation: what a user wrote.
      what: the method that got it.
      none: whether NONE will do.

    Raises:
      ValueError: it is none, or ``NONE`` where there has to be one.
    """
    found: VariableAggregation | None = None
    if isinstance(aggregation, VariableAggregation):
        found = aggregation
    elif aggregation is None:
        found = VariableAggregation.NONE
    else:
        name = getattr(aggregation, "value", aggregation)  # of the core's enums
        if isinstance(name, str):
            name = name.lower().replace("replica", "tower")
            found = next((member for member in VariableAggregation if member.value == name), None)
    if found is None or (found is VariableAggregation.NONE and not none):
        wanted = "'sum', 'mean', 'only_first_tower'" + (", 'none'" if none else "")
        raise ValueError(f"{what}: expected one of {wanted}, or a VariableAggregation, got {aggregation!r}")
    return found
