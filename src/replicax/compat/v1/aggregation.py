"""``VariableAggregation``: how to combine the towers' values."""

from __future__ import annotations

import enum
from typing import Any

from replicax.variables.aggregation import Aggregation


class VariableAggregation(enum.Enum):
    """The way to combine the towers' values; here it is :class:`replicax.Aggregation`, and strings work, too.

    >>> from replicax.compat import v1
    >>> v1.VariableAggregation.ONLY_FIRST_TOWER.aggregation
    <Aggregation.ONLY_FIRST_REPLICA: 'only_first_replica'>
    """

    NONE = "none"
    """``replicax.Aggregation.NONE``: not combined."""
    SUM = "sum"
    """``replicax.Aggregation.SUM``: added up."""
    MEAN = "mean"
    """``replicax.Aggregation.MEAN``: averaged."""
    ONLY_FIRST_TOWER = "only_first_tower"
    """``replicax.Aggregation.ONLY_FIRST_REPLICA``: the value of tower 0."""

    @property
    def aggregation(self) -> Aggregation:
        """The equivalent :class:`replicax.Aggregation`."""
        return Aggregation[self.name.replace("TOWER", "REPLICA")]


def parse(aggregation: Any, what: str, none: bool = False) -> VariableAggregation:
    """Parse an aggregation of the method ``what``: a member, its name in any case, or the core's.

    Raises a ValueError if it is not an aggregation, or NONE where ``none`` is not allowed.
    """
    name = "none" if aggregation is None else getattr(aggregation, "value", aggregation)  # of enums, also the core's
    wanted = name.lower().replace("replica", "tower") if isinstance(name, str) else None
    found = next((member for member in VariableAggregation if member.value == wanted), None)
    if found is None or (found is VariableAggregation.NONE and not none):
        names = "'sum', 'mean', 'only_first_tower'" + (", 'none'" if none else "")
        raise ValueError(f"{what}: expected one of {names}, or a VariableAggregation, got {aggregation!r}")
    return found
