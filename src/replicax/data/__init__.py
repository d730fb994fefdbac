"""Input: datasets that feed every replica."""

from replicax.data.dataset import DistributedDataset
from replicax.data.feed import feed_of
from replicax.data.input_context import InputContext
from replicax.data.iterator import DistributedIterator
from replicax.data.options import AutoShardPolicy, InputOptions, PartialBatch, checked_input_options
from replicax.data.plan import InputPlan
from replicax.data.sources import numpy_examples
from replicax.data.taking import source_of
from replicax.data.values import ValueContext, values_from_function

__all__ = [
    "AutoShardPolicy",
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "InputOptions",
    "InputPlan",
    "PartialBatch",
    "ValueContext",
    "checked_input_options",
    "feed_of",
    "numpy_examples",
    "source_of",
    "values_from_function",
]
