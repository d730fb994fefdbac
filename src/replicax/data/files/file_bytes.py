"""Reads bytes and lines of files, plain or gzipped."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import zlib
from collections.abc import Callable
from typing import BinaryIO

# The size of the pieces in which a file is read, whatever its records are.
READ_AHEAD = 1 << 18
# A damaged file may claim to be endless: memory is allocated piece by piece.
_AT_ONCE = 1 << 24

_GZIP = b"\x1f\x8b\x08"


class Bytes:
    """The bytes of a file, from its beginning. Offsets count decompressed bytes.

    ``is_plain`` returns whether a file whose first bytes look like gzip is not gzipped.
    """

    def __init__(self, file: str, is_plain: Callable[[bytes], bool] = lambda head: False) -> None:
        self.file = file
        raw = io.BufferedReader(io.FileIO(file), READ_AHEAD)
        try:
            head = raw.peek()
            self.gzipped = head.startswith(_GZIP) and not is_plain(head)
            if file.endswith(".gz") and head and not self.gzipped:
                raise ValueError(f"{file}: named like a gzip file, but begins with {head[:4]!r}. Rename or gzip it.")
            #: The number of bytes; None if it is unknown without reading.
            self.size = None if self.gzipped else os.fstat(raw.fileno()).st_size
        except BaseException:
            raw.close()
            raise
        self._raw = raw
        self._bytes: BinaryIO = gzip.GzipFile(fileobj=raw, mode="rb") if self.gzipped else raw  # type: ignore[assignment]

    def read(self, size: int) -> bytes:
        """Read at most ``size`` bytes; fewer only at the end of the file."""
        pieces: list[bytes] = []
        try:
            while not pieces or (size > 0 and len(pieces[-1]) == _AT_ONCE):
                pieces.append(self._bytes.read(min(size, _AT_ONCE)))
                size -= _AT_ONCE
            return b"".join(pieces)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._broken(error) from error

    def readline(self) -> bytes:
        """The bytes up to the next line feed."""
        try:
            return self._bytes.readline()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._broken(error) from error

    def seek(self, offset: int) -> None:
        """Go to ``offset``: at once, or, in gzip, by reading up to it."""
        reached = self.reach(offset)
        if reached < offset:
            raise ValueError(
                f"{self.file} ends at byte {reached}, before byte {offset}: it has been changed or cut off"
            )

    def reach(self, offset: int) -> int:
        """Go to ``offset``, or to the end if that comes first; returns the place."""
        try:
            return self._bytes.seek(offset if self.size is None else min(offset, self.size))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._broken(error) from error

    def close(self) -> None:
        """Close the file. May be called again."""
        self._bytes.close()
        self._raw.close()

    def _broken(self, error: Exception) -> ValueError:
        return ValueError(
            f"{self.file}: the gzip stream is truncated or corrupt near byte {self._raw.tell()} of the file: {error}"
        )


def check_encoding(encoding: str, errors: str, what: str) -> None:
    """Refuse encodings with which lines can't be read."""
    try:
        feed = "\n".encode("utf-8" if _has_mark(encoding) else encoding)
        codecs.lookup_error(errors)
    except LookupError as error:
        raise ValueError(f"{what}: {error}") from error
    if feed != b"\n":
        raise ValueError(
            f"{what}: in encoding {encoding!r} a line feed is {feed!r}, so lines can't be told apart byte by byte: "
            "convert the files to UTF-8"
        )


def _has_mark(encoding: str) -> bool:
    return codecs.lookup(encoding).name == "utf-8-sig"


class Lines:
    r"""The lines of ``file`` as text, with their ends (``\n``, ``\r\n``, or none at the end of the file)."""

    def __init__(self, file: str, encoding: str, errors: str | None = None) -> None:
        self.file = file
        self.byte = 0
        self._encoding = encoding
        self._mark = _has_mark(encoding)
        self._errors = errors
        self._bytes = Bytes(file)

    def read(self) -> str:
        """The next line; empty at the end of the file."""
        line = self._bytes.readline()
        skip = len(codecs.BOM_UTF8) if self._mark and self.byte == 0 and line.startswith(codecs.BOM_UTF8) else 0
        encoding = "utf-8" if self._mark else self._encoding
        try:
            text = (line[skip:] if skip else line).decode(encoding, self._errors or "strict")
        except UnicodeDecodeError as error:
            bad = error.object[error.start : error.end]
            or_replace = ", or errors='replace'" if self._errors else ""
            raise ValueError(
                f"{self.file}: byte {self.byte + skip + error.start}: {bad!r} is not {self._encoding}: {error.reason}. "
                f"Pass the encoding that the file has (encoding='latin-1'){or_replace}."
            ) from error
        self.byte += len(line)
        # Only the mark: the file has a line, which is empty.
        return text or ("\n" if line else "")

    def go_to(self, byte: int) -> None:
        """Go to the start of a line."""
        self._bytes.seek(byte)
        self.byte = byte

    def close(self) -> None:
        """Close the file."""
        self._bytes.close()
