"""CRC-32C (Castagnoli), with NumPy.

The checksum is linear: that of a message is the exclusive or of what each of its bytes contributes, which depends on
the byte and on how far it is from the end. So a table of all contributions up to a distance makes it one look-up for
each byte and one reduction, without a Python loop over bytes.
"""

from __future__ import annotations

import functools

import numpy as np

_POLYNOMIAL = 0x82F63B78
# Bytes that go through the table at once. The table has 256 entries of 4 bytes for each, and should stay in the cache.
_BLOCK = 512


def crc32c(data: bytes) -> int:
    """The CRC-32C of ``data``.

    >>> hex(crc32c(b"123456789"))  # the check value of RFC 3720
    '0xe3069283'
    """
    table, step = _tables()
    message = np.frombuffer(data, np.uint8)
    crc = 0xFFFFFFFF
    first = len(message) % _BLOCK
    if first:
        crc = _shift(crc, first) ^ int(np.bitwise_xor.reduce(table[_offsets()[_BLOCK - first :] + message[:first]]))
    for start in range(first, len(message), _BLOCK * 256):  # in pieces, so that a huge record has no huge temporaries
        blocks = message[start : start + _BLOCK * 256].reshape(-1, _BLOCK)
        for block in np.bitwise_xor.reduce(table[_offsets() + blocks], axis=1).tolist():
            a, b, c, d = step
            crc = a[crc & 255] ^ b[crc >> 8 & 255] ^ c[crc >> 16 & 255] ^ d[crc >> 24] ^ block
    return crc ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """As TFRecord stores it: rotated and shifted, so that a checksum of data with checksums in it stays a good one."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def _offsets() -> np.ndarray:
    """Where the contributions of the bytes of a block begin in the flat table."""
    return np.arange(_BLOCK, dtype=np.int64) * 256


@functools.cache
def _tables() -> tuple[np.ndarray, tuple[list[int], ...]]:
    """The contribution of each byte at each place of a block; and of each byte of the checksum before the block."""
    byte = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        byte = np.where(byte & 1, byte >> 1 ^ np.uint32(_POLYNOMIAL), byte >> 1).astype(np.uint32)
    last = byte
    rows = [last]  # from the last byte of a block to the first
    for _ in range(_BLOCK - 1):
        rows.append(rows[-1] >> 8 ^ last[rows[-1] & 255])
    # The checksum before a block acts like its first four bytes.
    return np.concatenate(rows[::-1]), tuple(row.tolist() for row in rows[:-5:-1])


def _shift(crc: int, size: int) -> int:
    """The contribution of the checksum ``crc``, ``size`` bytes later; ``size`` is less than a block."""
    table, _ = _tables()
    row = _BLOCK - size  # where a message of this size begins
    result = crc >> 8 * size if size < 4 else 0
    for i in range(min(size, 4)):
        result ^= int(table[(row + i) * 256 + (crc >> 8 * i & 255)])
    return result
