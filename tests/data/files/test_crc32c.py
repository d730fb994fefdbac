from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax.data.files.crc32c import crc32c, masked_crc32c
from tests.data.files import writing


@pytest.mark.parametrize(
    ("data", "checksum"),
    [  # RFC 3720, B.4
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_known_values(data, checksum) -> None:
    assert crc32c(data) == checksum


@given(st.binary())
def test_against_the_definition(data) -> None:
    assert crc32c(data) == writing.crc32c(data)
    assert masked_crc32c(data).to_bytes(4, "little") == writing.masked(data)


@pytest.mark.parametrize(
    "size", [39, 40, 41, 509, 511, 512, 513, 1023, 1024, 1025, 512 + 39, 512 + 40, 512 * 256 - 1, 512 * 256 + 3]
)
def test_around_the_blocks(size) -> None:
    data = random.Random(size).randbytes(size)
    assert crc32c(data) == writing.crc32c(data)
