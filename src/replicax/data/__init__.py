"""Input: datasets that feed every replica."""

from replicax.data.dataset import DistributedDataset, DistributedIterator, source_of
from replicax.data.input_options import AutoShardPolicy, InputOptions, PartialBatch
from replicax.data.input_plan import InputPlan
from replicax.data.input_workers import InputContext
from replicax.data.value_context import ValueContext

__all__ = [
    "AutoShardPolicy",
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "InputOptions",
    "InputPlan",
    "PartialBatch",
    "ValueContext",
    "source_of",
]
