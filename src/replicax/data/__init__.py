"""Input: datasets that feed every replica."""

from replicax.data.dataset import DistributedDataset, DistributedIterator, source_of
from replicax.data.files import array_records, csv_rows, parquet_rows, text_lines, tfrecords
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
    "array_records",
    "csv_rows",
    "parquet_rows",
    "source_of",
    "text_lines",
    "tfrecords",
]
