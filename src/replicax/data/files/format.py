"""File formats: how to open a file, and how to continue from a place in it."""

from __future__ import annotations

import abc
import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Format:
    """A format with its options. A value: it is sent to other processes, and has no open file."""

    name: str  # the function that reads it, for messages
    places: tuple[str, ...]  # the names of the numbers in a reader's ``position``
    open: Callable[[str], Reader]  # gives a reader at the beginning of a file


class Reader(abc.ABC):
    """Reads one file, record by record.

    ``position`` counts only records that were read without an error, so that one can return to the place of an error.
    """

    file: str

    @abc.abstractmethod
    def __next__(self) -> Any:
        """The next record; raises ``ValueError``, with the file and the place, if it can't be read."""

    @abc.abstractmethod
    def position(self) -> dict[str, int]:
        """The place of the next record, in a form that the format finds again quickly."""

    @abc.abstractmethod
    def seek(self, position: dict[str, int]) -> None:
        """Go to a place from ``position()``."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the file. May be called again."""

    def skip(self, records: int) -> None:
        """Skip ``records`` records, from the beginning."""
        for skipped in range(records):
            if not self.pass_over():
                raise ended(self.file, skipped, records)

    def pass_over(self) -> bool:
        """Skip one record; False if there is none. Override it if that is faster than reading the record."""
        try:
            next(self)
        except StopIteration:
            return False
        return True


def ended(file: str, records: int, wanted: int) -> ValueError:
    """The error for a file that is shorter than it was."""
    return ValueError(
        f"{file}: {wanted} records of this file had been read when the state was saved, but it has only {records} now. "
        "Has it been changed or replaced?"
    )


def check_names(names: Sequence[str], where: str) -> None:
    """Refuse duplicate columns."""
    twice = sorted(name for name, count in collections.Counter(names).items() if count > 1)
    if twice:
        raise ValueError(f"{where} has the columns {twice} more than once: {list(names)}")
