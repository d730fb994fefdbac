"""Rows of Parquet files."""

from __future__ import annotations

import bisect
import functools
import itertools
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from replicax import _jax
from replicax.data.files import arrow
from replicax.data.files.format import Format, Reader, check_names, ended
from replicax.data.files.paths import Path, expand
from replicax.system.packages import check_installed

# The number of rows to convert at once.
_ROWS = 1024
# Column chunks are read in pieces of this size.
_BUFFER = 1 << 20


@_jax.hiding_frames
def parquet_rows(files: Path | Iterable[Path], columns: Sequence[str] | None = None) -> Any:
    """The rows of Parquet files as a Grain dataset of dicts from column to value.

    Values are NumPy scalars, ``str`` or ``bytes``, arrays for lists, and dicts for structs. A missing value is NaN in a
    floating column, and an error elsewhere. Files are read one after the other, in pieces, in the order of their names.
    A restored iterator continues at the row group of its place.

    Needs pyarrow: ``pip install 'replicax[parquet]'``.

    Args:
      files: a path, a glob (``**`` goes through directories), or a list of these. All have the same columns.
      columns: which columns to read; all by default.

    Returns:
      A ``grain.IterDataset``: continue with its ``map``, ``filter``, ``batch``.

    Raises:
      ImportError: pyarrow is not installed.
      FileNotFoundError: a file does not exist, or a glob matches none.
      TypeError: a column has a type without a NumPy form, such as decimals or maps.
      ValueError: a column is unknown or named twice, or a file is not a Parquet file; and, while reading, a file has
        other columns, is corrupt, or lacks a value, with the file, the column and the row.

    >>> import replicax, tempfile, os, pyarrow, pyarrow.parquet
    >>> file = os.path.join(tempfile.mkdtemp(), "points.parquet")
    >>> table = pyarrow.table({"x": [1.5, 2.5], "n": [3, 4], "name": ["a", "b"]})
    >>> pyarrow.parquet.write_table(table, file)
    >>> next(iter(replicax.data.parquet_rows(file)))
    {'x': np.float64(1.5), 'n': np.int64(3), 'name': 'a'}
    >>> next(iter(replicax.data.parquet_rows(file, ["n"]).batch(2)))
    {'n': array([3, 4])}
    """
    check_installed("replicax.data.parquet_rows", "pyarrow", "parquet")
    from replicax.data.files.file_source import FilesDataset  # loads Grain

    paths = expand(files, "parquet_rows")
    if columns is not None and (isinstance(columns, str) or not columns):
        raise ValueError(f"parquet_rows: columns must be a list of at least one column, got {columns!r}")
    wanted = tuple(columns) if columns is not None else None
    check_names(wanted or (), "parquet_rows: columns")
    types = next(filter(None, (types_in(file, wanted) for file in paths)), {})
    read = functools.partial(ParquetReader, columns=wanted, expected=types)
    return FilesDataset(paths, Format("parquet_rows", ("row",), read))


def types_in(file: str, columns: Sequence[str] | None) -> dict[str, str]:
    """The columns to read of ``file`` (``None``: all), and the names of their types; none if the file is empty."""
    parquet_file = opened(file)
    if parquet_file is None:
        return {}
    with parquet_file:
        return types_of(parquet_file, file, columns)


def types_of(parquet_file: Any, file: str, columns: Sequence[str] | None) -> dict[str, str]:
    """As :func:`types_in`, of a file that is open."""
    schema = parquet_file.schema_arrow
    check_names([name for name in schema.names if columns is None or name in columns], file)
    unknown = [column for column in columns or () if column not in schema.names]
    if unknown:
        raise ValueError(f"{file}: parquet_rows: columns names {unknown}, but the file has {schema.names}")
    fields = [schema.field(column) for column in (columns or schema.names)]
    for field in fields:
        arrow.check_type(field.type, f"{file}: column {field.name!r}")
    return {field.name: str(field.type) for field in fields}


def opened(file: str) -> Any:
    """Open ``file`` as a ``pyarrow.parquet.ParquetFile``; ``None`` if it is empty."""
    import pyarrow.parquet

    if not os.path.getsize(file):
        return None
    try:
        # With pre_buffer pyarrow would read row groups whole, before the first of their rows.
        return pyarrow.parquet.ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False, page_checksum_verification=True)
    except (ValueError, OSError) as error:  # the base classes of pyarrow's exceptions
        raise ValueError(f"{file}: truncated, corrupt, or no Parquet file: {error}") from error


class ParquetReader(Reader):
    """Reads rows as dicts; ``expected`` are the columns of the first file that is not empty, and their types."""

    def __init__(self, file: str, columns: Sequence[str] | None, expected: Mapping[str, str]) -> None:
        self.file = file
        self._columns = list(expected)
        self._file = opened(file)
        self._length = 0
        if self._file is not None:
            types = types_of(self._file, file, columns)
            if types != expected:
                raise ValueError(
                    f"{file}: every file must have the same columns as the first one, {dict(expected)}, but here are "
                    f"{types}"
                )
            self._length = self._file.metadata.num_rows
        self.seek({"row": 0})

    def __next__(self) -> dict[str, Any]:
        row = next(self._rows)
        self._row += 1
        return row

    def skip(self, records: int) -> None:
        self.seek({"row": records})

    def position(self) -> dict[str, int]:
        return {"row": self._row}

    def seek(self, position: dict[str, int]) -> None:
        self._row = position["row"]
        if self._row > self._length:
            raise ended(self.file, self._length, self._row)
        self._rows = self._from(self._row)

    def close(self) -> None:
        self._rows.close()
        if self._file is not None:
            self._file.close(force=True)

    def _from(self, row: int) -> Generator[dict[str, Any], None, None]:
        """The rows starting at number ``row``, which reads from the start of its row group."""
        if self._file is None:
            return
        groups = range(self._file.num_row_groups)
        starts = [0, *itertools.accumulate(self._file.metadata.row_group(group).num_rows for group in groups)]
        first = bisect.bisect_right(starts, row) - 1
        if first == len(groups):
            return
        start = starts[first]
        batches = self._file.iter_batches(_ROWS, row_groups=list(groups[first:]), columns=self._columns)
        while True:
            try:
                batch = next(batches, None)
            except (ValueError, OSError) as error:
                raise ValueError(f"{self.file}: corrupt in the {_ROWS} rows from row {start}: {error}") from error
            if batch is None:
                return
            skipped = min(max(row - start, 0), batch.num_rows)
            yield from self._rows_of(batch.slice(skipped), start + skipped)
            start += batch.num_rows

    def _rows_of(self, batch: Any, first_row: int) -> Iterator[dict[str, Any]]:
        columns = [arrow.rows(batch.column(name), f"{self.file}: column {name!r}", first_row) for name in self._columns]
        for values in zip(*columns, strict=True):
            yield dict(zip(self._columns, values, strict=True))
