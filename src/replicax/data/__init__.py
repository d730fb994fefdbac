"""Input: datasets that feed every replica."""

from replicax.data.dataset import DistributedDataset
from replicax.data.input_context import InputContext
from replicax.data.input_options import AutoShardPolicy, InputOptions, PartialBatch
from replicax.data.input_plan import InputPlan
from replicax.data.iterator import DistributedIterator
from replicax.data.step_source import source_of
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
