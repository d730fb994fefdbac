"""Bytes of a file, gunzipped if they are gzipped."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Callable
from typing import BinaryIO

# A file is read in pieces of this size, whatever its records are.
READ_AHEAD = 1 << 18
# Memory is taken for what is there, not for what a file says is there.
_AT_ONCE = 1 << 24

_GZIP = b"\x1f\x8b\x08"


class Bytes:
    """The bytes of a file, from its beginning on. Offsets are those of what has been gunzipped.

    Args:
      file: a path.
      is_plain: says of the first bytes of a file that only looks like gzip that it is none.

    Raises:
      ValueError: the file is named ``.gz`` and is no gzip.
    """

    def __init__(self, file: str, is_plain: Callable[[bytes], bool] = lambda head: False) -> None:
        self.file = file
        raw = io.BufferedReader(io.FileIO(file), READ_AHEAD)
        try:
            head = raw.peek(16)[:16]
            self.gzipped = head.startswith(_GZIP) and not is_plain(head)
            if file.endswith(".gz") and head and not self.gzipped:
                raise ValueError(f"{file}: named like a gzip file, but begins with {head[:4]!r}. Rename or gzip it.")
            #: How many bytes there are; None if that would have to be counted.
            self.size = None if self.gzipped else os.fstat(raw.fileno()).st_size
        except BaseException:
            raw.close()
            raise
        self._raw = raw
        self._bytes: BinaryIO = gzip.GzipFile(fileobj=raw, mode="rb") if self.gzipped else raw  # type: ignore[assignment]

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes; fewer only at the end of the file."""
        pieces = []
        try:
            while size > _AT_ONCE:
                pieces.append(self._bytes.read(_AT_ONCE))
                if len(pieces[-1]) < _AT_ONCE:
                    return b"".join(pieces)
                size -= _AT_ONCE
            last = self._bytes.read(size)
            return b"".join([*pieces, last]) if pieces else last
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
        if self.size is not None and offset > self.size:
            raise self._short(self.size, offset)
        try:
            reached = self._bytes.seek(offset)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._broken(error) from error
        if reached < offset:
            raise self._short(reached, offset)

    def close(self) -> None:
        """Close the file. May be called again."""
        self._bytes.close()
        self._raw.close()

    def _short(self, end: int, offset: int) -> ValueError:
        return ValueError(f"{self.file} ends at byte {end}, before byte {offset}: it has been changed or cut off")

    def _broken(self, error: Exception) -> ValueError:
        return ValueError(
            f"{self.file}: the gzip stream is truncated or corrupt near byte {self._raw.tell()} of the file: {error}"
        )
