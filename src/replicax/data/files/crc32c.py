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
# Fewer bytes are quicker one by one than in NumPy.
_FEW = 40


def crc32c(data: bytes) -> int:
    """The CRC-32C of ``data``.

    >>> hex(crc32c(b"123456789"))  # the check value of RFC 3720
    '0xe3069283'
    """
    table, single, step = _tables()
    crc = 0xFFFFFFFF
    first = len(data) % _BLOCK
    if first < _FEW:
        for byte in data[:first]:
            crc = single[crc & 255 ^ byte] ^ crc >> 8
    message = np.frombuffer(data, np.uint8) if len(data) >= _FEW else np.empty(0, np.uint8)
    if first >= _FEW:
        places = _offsets()[_BLOCK - first :]
        crc = _later(crc, places) ^ int(np.bitwise_xor.reduce(table[places + message[:first]]))
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
def _tables() -> tuple[np.ndarray, list[int], tuple[list[int], ...]]:
    """What each byte contributes at each place of a block; as the last one; and as each of the first four.

    The checksum before a block acts as if it were xored to the first four bytes of the block.
    """
    last = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        last = np.where(last & 1, last >> 1 ^ np.uint32(_POLYNOMIAL), last >> 1).astype(np.uint32)
    rows = [last]  # from the last byte of a block to the first
    for _ in range(_BLOCK - 1):
        rows.append(rows[-1] >> 8 ^ last[rows[-1] & 255])
    rows.reverse()
    return np.concatenate(rows), last.tolist(), tuple(row.tolist() for row in rows[:4])


def _later(crc: int, places: np.ndarray) -> int:
    """What the checksum ``crc`` contributes after a message of at least four bytes, whose bytes have these places."""
    table, _, _ = _tables()
    result = 0
    for i in range(4):
        result ^= int(table[places[i] + (crc >> 8 * i & 255)])
    return result
