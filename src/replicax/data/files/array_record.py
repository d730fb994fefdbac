"""ArrayRecord files: random access."""

from __future__ import annotations

import itertools
import os
import types
from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
from typing import Any, SupportsIndex

from replicax import _jax
from replicax._grain import BatchedSource
from replicax.data.files.paths import Path, expand

# How many files have their indices read at the same time: on a network file system each takes a while.
_AT_ONCE = 16


@_jax.hiding_frames
def array_records(files: Path | Iterable[Path]) -> Any:
    """The records of ArrayRecord files as a Grain dataset of ``bytes`` with random access.

    Records are numbered file after file, in the order of the files' names. Grain's own source reads them.

    Args:
      files: a path, a glob (``**`` goes through directories), or a list of these.

    Returns:
      A ``grain.MapDataset``: continue with its ``seed``, ``shuffle``, ``map`` (to parse the records), ``batch``.

    Raises:
      FileNotFoundError: a file does not exist, or a glob matches none.
      ValueError: a file is truncated or not an ArrayRecord file; and, while reading, a record is corrupt, with the file
        and the number of the record in it.

    >>> import replicax, tempfile, os
    >>> from array_record.python.array_record_module import ArrayRecordWriter
    >>> file = os.path.join(tempfile.mkdtemp(), "words.array_record")
    >>> writer = ArrayRecordWriter(file, "group_size:1")
    >>> _ = writer.write(b"some"), writer.write(b"words"), writer.close()
    >>> words = replicax.data.array_records(file)
    >>> len(words), words[1]
    (2, b'words')
    """
    import grain  # heavy: loaded when used

    return grain.MapDataset.source(ArrayRecords(expand(files, "array_records")))


class ArrayRecords(BatchedSource):
    """A random-access source over several files; records are numbered in the order of ``files``."""

    def __init__(self, files: Iterable[str], counted: Mapping[str, int] | None = None) -> None:
        from grain.sources import ArrayRecordDataSource

        self.files = tuple(files)
        self._counts = dict(counted or {})
        new = [file for file in self.files if file not in self._counts]
        with futures.ThreadPoolExecutor(_AT_ONCE) as threads:
            self._counts.update(zip(new, threads.map(_count, new), strict=True))
        counts = {file: self._counts[file] for file in self.files if self._counts[file]}
        #: The non-empty files, and the number of the first record of each.
        self._starts = dict(zip(counts, itertools.accumulate(counts.values(), initial=0), strict=False))
        self._length = sum(counts.values())
        # Grain's source need then not open the files again, and takes "x[0:2]" for a name, not for a slice of x.
        parts = [types.SimpleNamespace(filename=f, skip=0, take=n, examples_in_shard=n) for f, n in counts.items()]
        self._source: Any = ArrayRecordDataSource(parts) if parts else ()

    def with_files(self, files: Iterable[str]) -> ArrayRecords:
        """Return the same source over other files, such as one worker's."""
        return ArrayRecords(files, self._counts)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: SupportsIndex) -> bytes:
        try:
            return bytes(self._source[index])
        except RuntimeError as error:
            raise self._error(int(index), error) from error

    def read_several(self, indices: Sequence[int]) -> Sequence[bytes]:
        """Several records, from several files at once."""
        try:
            return list(self._source.__getitems__(indices))
        except RuntimeError:
            return [self[index] for index in indices]  # one of them is corrupt: find it

    def _error(self, index: int, error: Exception) -> ValueError:
        file = [file for file, start in self._starts.items() if start <= index][-1]
        return ValueError(f"{file}: record {index - self._starts[file]} can't be read: {error}")

    def __repr__(self) -> str:
        return f"array_records({len(self.files)} files, {self._length} records)"


def _count(file: str) -> int:
    """The number of records of ``file``, from its end."""
    from array_record.python.array_record_module import ArrayRecordReader

    if os.path.getsize(file) == 0:
        return 0
    try:
        reader = ArrayRecordReader(file)
        # Opening a truncated file succeeds, as if it had no records.
        readable, count = reader.ok(), reader.num_records()
        reader.close()
    except RuntimeError as error:
        readable, reason = False, str(error)
    else:
        reason = "its index can't be read"
    if not readable:
        raise ValueError(f"{file}: truncated, corrupt, or no ArrayRecord file ({reason or 'its index is missing'})")
    return int(count)
