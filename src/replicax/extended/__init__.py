"""The part of a strategy for library code."""

from replicax.extended.strategy_extended import StrategyExtended

__all__ = ["StrategyExtended"]
