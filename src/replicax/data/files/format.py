"""File formats: how to open a file, and how to read on from a place in it."""

from __future__ import annotations

import abc
from typing import Any


class Format(abc.ABC):
    """One format with its options. A value: it travels to other processes, and knows no file.

    Attributes:
      name: the function that users called, for messages.
      places: the keys of a position.
    """

    name: str
    places: tuple[str, ...]

    @abc.abstractmethod
    def open(self, file: str) -> Reader:
        """A reader at the beginning of ``file``."""


class Reader(abc.ABC):
    """Reads one file, record by record.

    ``position`` counts only what was read without an error, so that one can come back to where an error was.
    """

    file: str

    @abc.abstractmethod
    def __next__(self) -> Any:
        """The next record; ``ValueError``, with the file and the place, where it can't be read."""

    @abc.abstractmethod
    def position(self) -> dict[str, int]:
        """Where the next record begins, in whatever the format can find again quickly."""

    @abc.abstractmethod
    def seek(self, position: dict[str, int]) -> None:
        """Go to where ``position()`` once was."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the file. May be called again."""

    def skip(self, records: int) -> None:
        """Go on by ``records`` records, from the beginning."""
        for skipped in range(records):
            if not self.pass_over():
                raise ended(self.file, skipped, records)

    def pass_over(self) -> bool:
        """Leave out one record; False if there is none. To be overridden where that is quicker than reading it."""
        try:
            next(self)
        except StopIteration:
            return False
        return True


def ended(file: str, records: int, wanted: int) -> ValueError:
    """The error that a file is shorter than it was."""
    return ValueError(
        f"{file}: {wanted} records of this file had been read when the state was saved, but it has only {records} now. "
        "Has it been changed or replaced?"
    )


class Nothing(Reader):
    """Reads an empty file."""

    def __init__(self, file: str, places: tuple[str, ...]) -> None:
        self.file = file
        self._places = places

    def __next__(self) -> Any:
        raise StopIteration

    def position(self) -> dict[str, int]:
        return dict.fromkeys(self._places, 0)

    def seek(self, position: dict[str, int]) -> None:
        if any(position.values()):
            raise ValueError(f"{self.file} is empty, but was not when the state was saved: has it been changed?")

    def close(self) -> None:
        pass
