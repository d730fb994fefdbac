"""Writes files of every format, without the code that reads them."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import strategies as st

import replicax


def crc32c(data: bytes) -> int:
    """Bit by bit, as the polynomial says."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def tfrecord_bytes(records: Sequence[bytes]) -> bytes:
    lengths = [struct.pack("<Q", len(data)) for data in records]
    return b"".join(n + masked(n) + data + masked(data) for n, data in zip(lengths, records, strict=True))


def write_tfrecords(path: Path, records: Sequence[bytes]) -> None:
    path.write_bytes(tfrecord_bytes(records))


def write_tfrecords_gzipped(path: Path, records: Sequence[bytes]) -> None:
    path.write_bytes(gzip.compress(tfrecord_bytes(records)))


def write_lines(path: Path, records: Sequence[str]) -> None:
    path.write_bytes("".join(line + "\n" for line in records).encode())


def write_lines_gzipped(path: Path, records: Sequence[str]) -> None:
    # Two members, as `cat a.gz b.gz` makes them.
    half = len(records) // 2
    parts = ["".join(line + "\r\n" for line in part) for part in (records[:half], records[half:])]
    path.write_bytes(b"".join(gzip.compress(part.encode()) for part in parts))


def csv_text(records: Sequence[dict[str, Any]]) -> str:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, ["i", "x", "s"], quoting=csv.QUOTE_NONNUMERIC)
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def write_csv(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.write_bytes(csv_text(records).encode())


def write_csv_gzipped(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.write_bytes(gzip.compress(csv_text(records).encode()))


def write_parquet(path: Path, records: Sequence[dict[str, Any]]) -> None:
    types = pyarrow.schema([("i", pyarrow.int64()), ("x", pyarrow.float64()), ("s", pyarrow.string())])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records), types), path, row_group_size=3)


def write_array_records(path: Path, records: Sequence[bytes]) -> None:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


# What a line, a row, a record may be. Lines end with \n or \r\n, so a line has no \n in it and no \r at its end.
LINE = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"])).filter(lambda s: not s.endswith("\r"))
# A lone \r is a line end to the csv module, which quotes it; NUL it refuses in some versions.
CELL = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
ROW = st.fixed_dictionaries(
    {"i": st.integers(-(2**63), 2**63 - 1), "x": st.floats(allow_nan=False), "s": CELL},
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A format with its options."""

    read: Callable[..., Any]
    write: Callable[[Path, Sequence[Any]], None]
    records: st.SearchStrategy[Any]
    suffix: str


def read_csv(files: Any) -> Any:
    return replicax.data.csv_rows(files, dtypes={"i": np.int64, "x": np.float64, "s": str})


KINDS = {
    "text": Kind(replicax.data.text_lines, write_lines, LINE, ".txt"),
    "text.gz": Kind(replicax.data.text_lines, write_lines_gzipped, LINE, ".txt.gz"),
    "csv": Kind(read_csv, write_csv, ROW, ".csv"),
    "csv.gz": Kind(read_csv, write_csv_gzipped, ROW, ".csv.gz"),
    "tfrecord": Kind(replicax.data.tfrecords, write_tfrecords, st.binary(max_size=1200), ".tfrecord"),
    "tfrecord.gz": Kind(replicax.data.tfrecords, write_tfrecords_gzipped, st.binary(max_size=40), ".tfrecord.gz"),
    "parquet": Kind(replicax.data.parquet_rows, write_parquet, ROW, ".parquet"),
}


def write_all(kind: Kind, folder: Path, contents: Sequence[Sequence[Any]]) -> list[str]:
    """One file for each of ``contents``; an empty one may have nothing in it at all, not even a header."""
    files = []
    for number, records in enumerate(contents):
        path = folder / f"part-{number:03}{kind.suffix}"
        if records or number % 2:
            kind.write(path, records)
        else:
            path.write_bytes(b"")
        files.append(str(path))
    return files
