"""The part of a strategy for library code."""

from replicax.extended.strategy_extended import ReplicaOptions, StrategyExtended

__all__ = ["ReplicaOptions", "StrategyExtended"]
