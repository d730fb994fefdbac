"""TFRecord files."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from replicax import _jax
from replicax.data.files.file_bytes import Bytes
from replicax.data.files.format import Format, Reader
from replicax.data.files.paths import Path, expand

# A record: its length (8 bytes), the masked CRC of the length (4), the data, the masked CRC of the data (4).
_HEADER = 12
_FOOTER = 4


@_jax.hiding_frames
def tfrecords(files: Path | Iterable[Path]) -> Any:
    """The records of TFRecord files, plain or gzipped, as a Grain dataset of ``bytes``.

    Both checksums of every record are checked. Files are read one after the other, in pieces, in the order of their
    names. Iterators save byte offsets, so a restored one continues at once (in a gzip file after reading up to there).

    Args:
      files: a path, a glob (``**`` goes through directories), or a list of these. Gzip is detected by the content.

    Returns:
      A ``grain.IterDataset``: continue with its ``map`` (to parse the records), ``filter``, ``batch``.

    Raises:
      FileNotFoundError: a file does not exist, or a glob matches none.
      ValueError: while reading, a record is truncated or corrupt, with the file and the byte where the record begins.

    >>> import replicax, tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "digits.tfrecord"
    >>> _ = file.write_bytes(
    ...     bytes.fromhex("0300000000000000b099490e6162636e57f121")  # length, its checksum, b"abc", its checksum
    ... )
    >>> list(replicax.data.tfrecords(file))
    [b'abc']
    """
    from replicax.data.files.file_source import FilesDataset  # loads Grain

    return FilesDataset(expand(files, "tfrecords"), Format("tfrecords", ("byte",), TFRecordReader))


def masked_crc32c(data: bytes) -> int:
    """TFRecord's form of CRC-32C: rotated and shifted, as data may contain checksums."""
    import google_crc32c  # loaded when used

    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _length_is_right(header: bytes) -> bool:
    """Return whether the length matches its checksum."""
    return len(header) >= _HEADER and masked_crc32c(header[:8]) == int.from_bytes(header[8:_HEADER], "little")


class TFRecordReader(Reader):
    """Reads records, and checks them."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._byte = 0
        # A file whose first record has the right length (559,903 bytes, or that plus a multiple of 2**24) looks like
        # gzip.
        self._bytes = Bytes(file, is_plain=_length_is_right)

    def __next__(self) -> bytes:
        length = self._length()
        if length is None:
            raise StopIteration
        rest = self._bytes.read(length + _FOOTER)
        if len(rest) < length + _FOOTER:
            raise self._error(
                f"truncated: {length} bytes and their checksum ({_FOOTER}) should follow, got {len(rest)}"
            )
        data, stored = rest[:length], int.from_bytes(rest[length:], "little")
        computed = masked_crc32c(data)
        if stored != computed:
            raise self._error(
                f"corrupt: the checksum of its {length} bytes is {computed:#010x}, but {stored:#010x} is stored"
            )
        self._byte += _HEADER + length + _FOOTER
        return data

    def pass_over(self) -> bool:
        length = self._length()
        if length is None:
            return False
        end = self._byte + _HEADER + length + _FOOTER
        reached = self._bytes.reach(end)
        if reached < end:
            raise self._error(f"truncated: it should end at byte {end}, but the file ends at {reached}")
        self._byte = end
        return True

    def position(self) -> dict[str, int]:
        return {"byte": self._byte}

    def seek(self, position: dict[str, int]) -> None:
        self._bytes.seek(position["byte"])
        self._byte = position["byte"]

    def close(self) -> None:
        self._bytes.close()

    def _length(self) -> int | None:
        """The length of the next record, checked before so much is read; None at the end of the file."""
        header = self._bytes.read(_HEADER)
        if not header:
            return None
        if len(header) < _HEADER:
            raise self._error(f"truncated: its length and checksum are {_HEADER} bytes, got {len(header)}")
        if not _length_is_right(header):
            hint = ", or the file is no TFRecord file" if self._byte == 0 else ""
            raise self._error(f"corrupt: the checksum of its length is wrong{hint}")
        return int(struct.unpack_from("<Q", header)[0])

    def _error(self, problem: str) -> ValueError:
        where = " of the unzipped data" if self._bytes.gzipped else ""
        return ValueError(f"{self.file}: the record at byte {self._byte}{where} is {problem}")
