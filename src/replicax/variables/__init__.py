"""Variables: handles to arrays that outlive a step, and the rules of reading and assigning them."""

from replicax.variables.aggregation import Aggregation, Synchronization
from replicax.variables.partitioners import (
    FixedShardsPartitioner,
    GroupPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
)
from replicax.variables.sharded_variable import ShardedVariable
from replicax.variables.trees import as_arrays, as_variables, assign
from replicax.variables.variable import Variable

__all__ = [
    "Aggregation",
    "FixedShardsPartitioner",
    "GroupPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "ShardedVariable",
    "Synchronization",
    "Variable",
    "as_arrays",
    "as_variables",
    "assign",
]
