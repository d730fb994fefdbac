"""Lines of text in a file, and where each begins."""

from __future__ import annotations

import codecs

from replicax.data.files.opening import Bytes


def check_encoding(encoding: str, errors: str, what: str) -> None:
    """Refuse what lines can't be read with.

    Raises:
      ValueError: there is no such encoding or error handler, or a line feed is not one byte in it.
    """
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
    r"""The lines of ``file`` as text, with their ends (``\n``, ``\r\n``, or none at the end of the file).

    Attributes:
      file: the path.
      byte: where the next line begins.
    """

    def __init__(self, file: str, encoding: str, errors: str) -> None:
        self.file = file
        self.byte = 0
        self._encoding = encoding
        self._mark = _has_mark(encoding)
        self._errors = errors
        self._bytes = Bytes(file)

    def read(self) -> str:
        """The next line; empty at the end of the file.

        Raises:
          ValueError: bytes that the encoding doesn't know; the message has their offset.
        """
        line = self._bytes.readline()
        skip = len(codecs.BOM_UTF8) if self._mark and self.byte == 0 and line.startswith(codecs.BOM_UTF8) else 0
        encoding = "utf-8" if self._mark else self._encoding
        try:
            text = (line[skip:] if skip else line).decode(encoding, self._errors)
        except UnicodeDecodeError as error:
            bad = error.object[error.start : error.end]
            raise ValueError(
                f"{self.file}: byte {self.byte + skip + error.start}: {bad!r} is no {self._encoding}: {error.reason}. "
                "Pass the encoding that the file has (encoding='latin-1'), or errors='replace'."
            ) from error
        self.byte += len(line)
        # Only the mark: there is a line, which is empty.
        return text or ("\n" if line else "")

    def pass_over(self) -> bool:
        """Leave out a line; False at the end of the file."""
        line = self._bytes.readline()
        self.byte += len(line)
        return bool(line)

    def seek(self, byte: int) -> None:
        """Go to where a line begins."""
        self._bytes.seek(byte)
        self.byte = byte

    def close(self) -> None:
        """Close the file."""
        self._bytes.close()
