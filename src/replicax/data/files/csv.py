"""Rows of CSV files."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from replicax import _jax
from replicax.data.files.csv_values import Converter, converters, requested
from replicax.data.files.file_bytes import Lines, check_encoding
from replicax.data.files.format import Format, Reader, check_names
from replicax.data.files.paths import Path, expand
from replicax.errors import shortened

# The number of rows that decide the dtype of a column.
_SAMPLE = 100
_NOTHING = contextlib.nullcontext()


@_jax.hiding_frames
def csv_rows(
    files: Path | Iterable[Path],
    *,
    names: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    dtypes: Any = None,
    delimiter: str = ",",
    encoding: str = "utf-8-sig",
) -> Any:
    r"""The rows of CSV files, plain or gzipped, as a Grain dataset of dicts from column to value.

    Values are NumPy scalars, or ``str`` in text columns. The first 100 rows of all files together decide the dtype of
    a column (int64, float64 or text) once, when the dataset is created, and a later value that doesn't fit is an error;
    ``dtypes`` sets it explicitly. An empty field is NaN in a floating column, an empty string in a text column, and an
    error elsewhere; so integers among empty fields become float64, or text if that would round one. Quoting is that of
    Python's ``csv`` module, strictly; blank lines are ignored.

    Files are read one after the other, in pieces, in the order of their names. Iterators save byte offsets, so
    a restored one continues at once (in a gzip file after reading up to there).

    Args:
      files: a path, a glob (``**`` goes through directories), or a list of these. Gzip is detected by the content.
      names: the columns of files that have no header row. Without them, the first row of every file names its columns;
        all files must have the same ones, in any order.
      columns: which columns to keep; all by default.
      dtypes: one for all columns, or a dict for some: whatever ``np.dtype`` takes; ``str`` for text.
      delimiter: between fields; one character.
      encoding: of the text; any in which a line feed is one byte. The default is UTF-8, with or without a mark.

    Returns:
      A ``grain.IterDataset``: continue with its ``map``, ``filter``, ``batch``.

    Raises:
      FileNotFoundError: a file does not exist, or a glob matches none.
      TypeError: text can't be read as one of the ``dtypes``.
      ValueError: a column is unknown or named twice; and, while reading (the first 100 rows at once), a file has other
        columns, or a row has another number of fields, bad quoting, or a value that does not fit its column's dtype,
        with the file and the line.

    >>> import replicax, tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "flowers.csv"
    >>> _ = file.write_text("length,petals,name\n1.5,5,rose\n2,4,poppy\n")
    >>> next(iter(replicax.data.csv_rows(file)))
    {'length': np.float64(1.5), 'petals': np.int64(5), 'name': 'rose'}
    >>> next(iter(replicax.data.csv_rows(file, columns=["length"], dtypes="float32").batch(2)))
    {'length': array([1.5, 2. ], dtype=float32)}
    """
    from replicax.data.files.file_source import FilesDataset  # loads Grain

    check_encoding(encoding, "strict", "csv_rows")
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '\r\n"':
        raise ValueError(
            f"csv_rows: delimiter must be one character other than a quote or a line end, got {delimiter!r}"
        )
    for what, given in (("names", names), ("columns", columns)):
        if given is not None and (isinstance(given, str) or not given):
            raise ValueError(f"csv_rows: {what} must be a list of at least one column, got {given!r}")
    paths = expand(files, "csv_rows")
    form = _Form(tuple(names) if names is not None else None, delimiter, encoding)
    check_names(form.names or (), "csv_rows: names")
    header, rows = form.sample(paths)
    for what, wanted in (("columns", columns or ()), ("dtypes", dtypes if isinstance(dtypes, Mapping) else ())):
        unknown = [column for column in wanted if column not in header]
        if unknown and header:
            raise ValueError(f"csv_rows: {what} names {unknown}, but the files have the columns {list(header)}")
    kept = tuple(columns) if columns is not None else header
    check_names(kept, "csv_rows: columns")
    wanted_dtypes = requested(dtypes, header)
    values = converters({name: [row[i] for row in rows] for i, name in enumerate(header)}, wanted_dtypes)
    chosen = {name: values[name] for name in kept if name in values}  # empty if no file has a header
    read = functools.partial(form.open, header=header, values=chosen)
    return FilesDataset(paths, Format("csv_rows", ("byte", "line"), read))


@dataclasses.dataclass(frozen=True)
class _Form:
    """The form of CSV files; ``names`` are the columns, if files have no header row."""

    names: tuple[str, ...] | None
    delimiter: str
    encoding: str

    def open(self, file: str, header: tuple[str, ...], values: Mapping[str, Converter]) -> CsvReader:
        """A reader of dicts.

        ``header`` has the columns of the first file that is not empty; it is empty if all files are. ``values`` has the
        converter of the text of each column to keep.
        """
        rows, columns = self._reader_of(file, header)
        rows.read_as(columns, values)
        return rows

    def _reader_of(self, file: str, header: tuple[str, ...] | None) -> tuple[CsvReader, tuple[str, ...]]:
        """A reader before the first row of ``file``, and the columns there; no columns if the file is empty."""
        rows = CsvReader(file, self.delimiter, self.encoding)
        try:
            columns = self.names
            if columns is None:
                columns = tuple(rows.read(None) or ())
                check_names(columns, f"{rows.file}: the header row")
            if columns and header is not None and set(columns) != set(header):
                missing, more = sorted(set(header) - set(columns)), sorted(set(columns) - set(header))
                raise ValueError(
                    f"{file}: every file must have the same columns as the first one, {list(header)}, but here are "
                    f"{list(columns)} (missing: {missing}, more: {more})"
                )
        except BaseException:
            rows.close()
            raise
        return rows, columns

    def sample(self, files: Iterable[str]) -> tuple[tuple[str, ...], list[list[str]]]:
        """The columns, and the first rows of all files together, each in the order of these columns."""
        header: tuple[str, ...] = ()
        first: list[list[str]] = []
        for file in files:
            rows, columns = self._reader_of(file, header or None)
            try:
                header = header or columns
                order = [columns.index(name) for name in header] if columns else []
                while len(first) < _SAMPLE and (row := rows.read(len(columns))) is not None:
                    first.append([row[i] for i in order])
            finally:
                rows.close()
            if len(first) == _SAMPLE:
                break
        return header, first


class CsvReader(Reader):
    """Reads rows as lists of text or, after :meth:`read_as`, as dicts."""

    def __init__(self, file: str, delimiter: str, encoding: str) -> None:
        self.file = file
        self._lines = Lines(file, encoding)
        self._delimiter = delimiter
        self._begin(0)

    def _begin(self, line: int) -> None:
        self._passed = line  # before the reader, which counts its own
        self._first_line = line  # of the last row, from 1
        self._reader = csv.reader(iter(self._lines.read, ""), delimiter=self._delimiter, strict=True)
        self._note_line()

    def read_as(self, columns: Sequence[str], values: Mapping[str, Converter]) -> None:
        """Read dicts from now on: for some columns, the values of their text."""
        self._fields = len(columns)
        self._values = [(name, columns.index(name), value) for name, value in values.items()] if columns else []
        self._may_overflow = any(value.may_overflow for value in values.values())
        self._note_line()

    def __next__(self) -> dict[str, Any]:
        row = self.read(self._fields)
        if row is None:
            raise StopIteration
        result = {}
        # A converter refuses a number that is too large, of which NumPy would warn.
        with np.errstate(over="ignore") if self._may_overflow else _NOTHING:
            for name, field, value in self._values:
                try:
                    result[name] = value(row[field])
                except (ValueError, OverflowError) as error:
                    raise ValueError(
                        f"{self.file}: line {self._first_line}: column {name!r}: {value.problem(row[field], name)}"
                    ) from error
        self._note_line()
        return result

    def read(self, fields: int | None) -> list[str] | None:
        """The next row that is not blank, or None at the end of the file.

        It must have so many ``fields``; None takes any number.
        """
        row: list[str] = []
        while not row:
            self._first_line = self._line + 1
            try:
                row = next(self._reader)
            except StopIteration:
                return None
            except csv.Error as error:
                raise ValueError(f"{self.file}: line {self._first_line}: {_explained_error(error)}") from error
        if fields is not None and len(row) != fields:
            short = shortened(self._delimiter.join(row))
            raise ValueError(
                f"{self.file}: line {self._first_line}: {fields} fields are expected, as there are columns, got "
                f"{len(row)}: {short!r}"
            )
        return row

    def pass_over(self) -> bool:
        row = self.read(self._fields)
        self._note_line()
        return row is not None

    def position(self) -> dict[str, int]:
        return self._done

    def seek(self, position: dict[str, int]) -> None:
        self._lines.go_to(position["byte"])
        self._begin(position["line"])

    def close(self) -> None:
        self._lines.close()

    @property
    def _line(self) -> int:
        """The number of lines read."""
        return self._passed + self._reader.line_num

    def _note_line(self) -> None:
        # The csv module reads no more lines than it needs for a row.
        self._done = {"byte": self._lines.byte, "line": self._line}


def _explained_error(error: csv.Error) -> str:
    if "field limit" in str(error):
        return f"{error}: a quote is not closed, or the limit is too low for these files: csv.field_size_limit(bytes)"
    if "unexpected end" in str(error):
        return "a quote is opened, and not closed before the file ends"
    return str(error)
