"""The part of a strategy that library code uses."""

from replicax.extended.strategy_extended import StrategyExtended

__all__ = ["StrategyExtended"]
