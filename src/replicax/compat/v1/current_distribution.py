"""The current distribution strategy or tower."""

from __future__ import annotations

from replicax import context
from replicax.compat.v1.distribution import DistributionStrategy
from replicax.compat.v1.towers import TowerContext


def get_distribution_strategy() -> DistributionStrategy:
    """The strategy of the present scope or step, or the default one; ``replicax.get_strategy``.

    >>> from replicax.compat import v1
    >>> v1.get_distribution_strategy().is_single_tower
    True
    """
    return DistributionStrategy.of(context.get_strategy())


def has_distribution_strategy() -> bool:
    """Return whether the current strategy is not the default one; ``replicax.has_strategy``.

    >>> from replicax.compat import v1
    >>> v1.has_distribution_strategy()
    False
    """
    return context.has_strategy()


def get_tower_context() -> TowerContext | None:
    """The current tower's context, or ``None`` in cross-tower context; ``replicax.get_replica_context``.

    >>> from replicax.compat import v1
    >>> v1.get_tower_context().num_towers  # outside every scope: the default one
    1
    """
    replica = context.get_replica_context()
    return None if replica is None else TowerContext(DistributionStrategy.of(replica.strategy), replica)


def get_cross_tower_context() -> DistributionStrategy | None:
    """The strategy in cross-tower context, or ``None`` in a tower; ``replicax.in_cross_replica_context``.

    >>> from replicax.compat import v1
    >>> with v1.MirroredStrategy(["cpu:0", "cpu:1"]).scope() as distribution:
    ...     v1.get_cross_tower_context() is distribution
    True
    """
    return get_distribution_strategy() if context.in_cross_replica_context() else None
