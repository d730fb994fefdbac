"""Input: datasets that feed every replica."""

from replicax.data.dataset import DistributedDataset, DistributedIterator, reader_of
from replicax.data.files import array_records, csv_rows, parquet_rows, text_lines, tfrecords
from replicax.data.options import AutoShardPolicy, InputOptions, PartialBatch
from replicax.data.plan import InputPlan
from replicax.data.value_context import ValueContext
from replicax.data.workers import InputContext

__all__ = [
    "AutoShardPolicy",
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "InputOptions",
    "InputPlan",
    "PartialBatch",
    "ValueContext",
    "array_records",
    "csv_rows",
    "parquet_rows",
    "reader_of",
    "text_lines",
    "tfrecords",
]
