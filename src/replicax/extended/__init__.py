"""The part of a strategy for library code."""

from replicax.extended.strategy_extended import SharingOptions, StrategyExtended

__all__ = ["SharingOptions", "StrategyExtended"]
