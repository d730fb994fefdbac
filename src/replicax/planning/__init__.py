"""Plan mode: what a compiled step needs, and how fast it could be, on devices that need not be there."""

from replicax.planning.chip_specs import Chip
from replicax.planning.planner import plan
from replicax.planning.report import Plan

__all__ = ["Chip", "Plan", "plan"]
