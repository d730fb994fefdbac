"""The root of a Grain graph that reads files one after the other.

Grain has readers for TFRecord and Parquet. But they check no CRC, name neither file nor place in an error, leave
closing files to the garbage collector, and do not tell how far each file has been read. So this module reads the
bytes; everything after that (map, filter, batch, prefetch) is Grain's.

This module imports Grain, so it is imported only when a dataset is created. Its classes are at the top level of a
module, not in a function, because Grain's worker processes unpickle them by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import grain

from replicax._grain import nodes
from replicax.data.files.format import Format, Reader
from replicax.data.reading.remaining_parts import check_count


class FilesDataset(grain.IterDataset):
    """The records of ``files``, file after file."""

    def __init__(self, files: Iterable[str], file_format: Format, skipped: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.files = tuple(files)
        self._format = file_format
        self._skipped = dict(skipped or {})

    def __iter__(self) -> FilesIterator:
        return FilesIterator(self.files, self._format, self._skipped)

    def with_files(self, files: Iterable[str]) -> FilesDataset:
        """Return the same dataset over other files, such as one worker's."""
        return FilesDataset(files, self._format, self._skipped)

    def with_positions(self, positions: Mapping[str, int]) -> FilesDataset:
        """Return the same dataset, with as many records skipped at the start of each file as ``positions`` says.

        Files that ``positions`` doesn't name are read from their beginning; entries for other files are ignored.
        Iterators' states count the skipped records as read. (A ``repeat`` after it skips in every epoch.)

        Raises:
          ValueError: a number is negative. (Reading a file with fewer records raises, too.)
        """
        wrong = {file: n for file, n in positions.items() if not isinstance(n, int) or n < 0}
        if wrong:
            raise ValueError(f"{self._format.name}: records to skip must be integers of at least 0, got {wrong}")
        return FilesDataset(self.files, self._format, positions)

    def positions(self, state: Mapping[str, Any]) -> dict[str, int]:
        """The number of records of each file that an iterator with this ``state`` has read."""
        positions = dict(zip(self.files, state["counts"], strict=True))
        if state["file"] < len(self.files):
            positions[self.files[state["file"]]] = state["records"]
        return positions

    def finished(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """The files that an iterator with this ``state`` has read to their end: they need not be opened again."""
        return self.files[: state["file"]]

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Take every n-th file: Grain divides a dataset in this way over the processes of a prefetch."""
        self.files = self.files[sl]

    def __str__(self) -> str:
        return f"{self._format.name}({len(self.files)} files)"


class FilesIterator(nodes.Iterator):
    """One pass over a :class:`FilesDataset`.

    Its state has the same structure from the beginning to the end, as Grain requires: ``file``, the number of the
    present file, and ``name``, its name; ``records``, how many of it have been read, and ``position``, the place of the
    next one (-1 before the file has been opened); ``counts``, how many records each file before it had, and how many to
    skip of each file after it. So any dataset of the same files can continue from a state.
    """

    _reader: Reader | None = None  # for close, if __init__ fails

    def __init__(self, files: tuple[str, ...], file_format: Format, skipped: Mapping[str, int]) -> None:
        super().__init__()
        self._files = files
        self._format = file_format
        self._counts = [skipped.get(file, 0) for file in files]
        self._begin(0)

    def __next__(self) -> Any:
        if self.is_closed:
            raise self.closed_error()
        while self._file < len(self._files):
            try:
                if self._reader is None:
                    self._reader = self._open(self._file, self._records, self._position)
                record = next(self._reader)
            except StopIteration:
                self.release()
                # A new list: states share the old one, so that a state costs the same with 10,000 files.
                self._counts = [*self._counts[: self._file], self._records, *self._counts[self._file + 1 :]]
                self._begin(self._file + 1)
            except BaseException:
                # The file is closed, and the state is the one before the bad record: the next call reads it again.
                self.release()
                raise
            else:
                self._records += 1
                return record
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        return {
            "file": self._file,
            "name": self._name(self._file),
            "records": self._records,
            "position": dict(self._position if self._reader is None else self._reader.position()),
            "counts": self._counts,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        file, files = state["file"], len(state["counts"])
        if files != len(self._files) or state["name"] != self._name(file):
            raise ValueError(
                f"{self._format.name}: the state was saved by an iterator over {files} files, where number {file} was "
                f"{state['name']!r}; this one is over {len(self._files)} files, and there it is {self._name(file)!r}. "
                "Make the dataset from the same files."
            )
        for number in (state["records"], *state["counts"], *(place + 1 for place in state["position"].values())):
            check_count(number, f"{self._format.name}: a number of records, or a place, in the state")
        records, position, reader = state["records"], dict(state["position"]), None
        if file < files and (records or any(place > 0 for place in position.values())):
            reader = self._open(file, records, position)  # at once: the file may have been truncated since
        self.release()
        self._file, self._counts = file, list(state["counts"])
        self._records, self._position, self._reader = records, position, reader

    def _begin(self, file: int) -> None:
        """Set the state before the first record of a file."""
        self._file = file
        self._records = self._counts[file] if file < len(self._files) else 0
        self._position = dict.fromkeys(self._format.places, -1)

    def _open(self, file: int, records: int, position: dict[str, int]) -> Reader:
        """A reader of a file, at a position or, if that is unknown, after so many records."""
        reader = self._format.open(self._files[file])
        try:
            if -1 not in position.values():
                reader.seek(position)
            elif records:
                reader.skip(records)
        except BaseException:
            reader.close()
            raise
        return reader

    def release(self) -> None:
        """Close the file, if one is open, and keep the place."""
        if self._reader is not None:
            self._position = self._reader.position()
            self._reader.close()
            self._reader = None

    def _name(self, file: int) -> str:
        # Without its directory, which may differ on the machine where the state is restored.
        return os.path.basename(self._files[file]) if file < len(self._files) else ""

    def __str__(self) -> str:
        return f"{self._format.name}({len(self._files)} files)"
