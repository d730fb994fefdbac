"""Variables: handles to arrays that outlive a step, and the rules of reading and assigning them."""

from replicax.variables.rules import Aggregation, Synchronization
from replicax.variables.variable import Variable

__all__ = ["Aggregation", "Synchronization", "Variable"]
