"""Input: datasets that feed every replica."""

from replicax.data.dataset import DistributedDataset, DistributedIterator
from replicax.data.sources import numpy_examples
from replicax.data.values import ValueContext, values_from_function

__all__ = [
    "DistributedDataset",
    "DistributedIterator",
    "ValueContext",
    "numpy_examples",
    "values_from_function",
]
