"""Files as Grain datasets: text lines, CSV, TFRecord, ArrayRecord, Parquet."""

from replicax.data.files.array_record import array_records
from replicax.data.files.csv import csv_rows
from replicax.data.files.parquet import parquet_rows
from replicax.data.files.text import text_lines
from replicax.data.files.tfrecord import tfrecords

__all__ = ["array_records", "csv_rows", "parquet_rows", "text_lines", "tfrecords"]
