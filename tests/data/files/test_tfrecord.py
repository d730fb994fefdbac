from __future__ import annotations

import gzip
import struct

import pytest
from hypothesis import given, strategies as st

import replicax
from tests.data.files.writing import masked, tfrecord_bytes

RECORDS = [b"first", b"", b"third" * 200]
WHOLE = tfrecord_bytes(RECORDS)
STARTS = [0, 12 + 5 + 4, 12 + 5 + 4 + 16]


def read(file):
    """The records, and the message of the error that they end in, if they do."""
    iterator = iter(replicax.data.tfrecords(file))
    records = []
    try:
        records.extend(iterator)
    except ValueError as error:
        return records, str(error)
    return records, None


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize(
    ("place", "number", "message"),
    [
        (0, 0, "is corrupt: the checksum of its length is wrong, or the file is no TFRecord file"),
        (9, 0, "is corrupt: the checksum of its length is wrong"),
        (STARTS[1] + 3, 1, "is corrupt: the checksum of its length is wrong"),
        (STARTS[1] + 13, 1, "is corrupt: the checksum of its 0 bytes is 0x.*, but 0x.* is stored"),
        (14, 0, "is corrupt: the checksum of its 5 bytes"),
        (STARTS[2] + 500, 2, "is corrupt: the checksum of its 1000 bytes"),
        (len(WHOLE) - 1, 2, "is corrupt: the checksum of its 1000 bytes"),
    ],
)
def test_each_place_where_a_byte_may_be_wrong(tmp_path, compress, place, number, message) -> None:
    file = tmp_path / "a.tfrecord"
    file.write_bytes(compress(WHOLE[:place] + bytes([WHOLE[place] ^ 1]) + WHOLE[place + 1 :]))
    records, error = read(file)
    assert records == RECORDS[:number]
    where = " of the unzipped data" if compress is gzip.compress else ""
    with pytest.raises(ValueError, match=rf"a\.tfrecord: the record at byte {STARTS[number]}{where} {message}"):
        raise ValueError(error)


@given(place=st.integers(0, len(WHOLE) - 1), flipped=st.integers(1, 255))
def test_any_wrong_byte_is_found(tmp_path_factory, place, flipped) -> None:
    file = tmp_path_factory.mktemp("tfrecord") / "a.tfrecord"
    file.write_bytes(WHOLE[:place] + bytes([WHOLE[place] ^ flipped]) + WHOLE[place + 1 :])
    records, error = read(file)
    number = max(i for i, start in enumerate(STARTS) if start <= place)
    assert records == RECORDS[:number]
    assert f"the record at byte {STARTS[number]} is corrupt" in str(error)


@pytest.mark.parametrize("skipping", [False, True])
@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_any_cut_is_found(tmp_path, compress, skipping) -> None:
    file = tmp_path / "a.tfrecord"
    for cut in [*range(60), len(WHOLE) - 500, len(WHOLE) - 3, len(WHOLE) - 1]:
        file.write_bytes(compress(WHOLE[:cut]))
        number = sum(start < cut for start in STARTS)
        if cut in (0, *STARTS):
            assert read(file) == (RECORDS[:number], None)
        elif skipping:
            iterator = iter(replicax.data.tfrecords(file).with_positions({str(file): 3}))
            with pytest.raises(ValueError, match=rf"the record at byte {STARTS[number - 1]}.* truncated"):
                next(iterator)
        else:
            records, error = read(file)
            assert records == RECORDS[: number - 1]
            assert f"the record at byte {STARTS[number - 1]}" in error
            assert "is truncated" in error


@pytest.mark.parametrize("skipped", [0, 3])
def test_a_gzip_that_is_cut_off(tmp_path, skipped) -> None:
    file = tmp_path / "a.tfrecord"
    file.write_bytes(gzip.compress(WHOLE)[:-20])
    with pytest.raises(ValueError, match=r"a\.tfrecord: the gzip stream is truncated or corrupt near byte \d+"):
        list(replicax.data.tfrecords(file).with_positions({str(file): skipped}))


def test_records_larger_than_a_piece(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("replicax.data.files.file_bytes._AT_ONCE", 20)
    (tmp_path / "a").write_bytes(tfrecord_bytes([b"a" * size for size in (15, 16, 17, 35, 36, 37)]))
    assert [len(record) for record in replicax.data.tfrecords(tmp_path / "a")] == [15, 16, 17, 35, 36, 37]


def test_a_huge_length_is_not_believed(tmp_path) -> None:
    # A terabyte of nothing: the checksum of the length is right, and the file ends.
    for number in (2**40, 559_903):  # whose bytes are those with which gzip files begin
        length = struct.pack("<Q", number)
        for compress in (bytes, gzip.compress):
            (tmp_path / "a").write_bytes(compress(length + masked(length) + b"data"))
            _, error = read(tmp_path / "a")
            assert f"is truncated: {number} bytes" in error


def test_the_error_stays_and_the_state_with_it(tmp_path) -> None:
    file = tmp_path / "a.tfrecord"
    file.write_bytes(WHOLE[:-1])
    iterator = iter(replicax.data.tfrecords(file))
    assert [next(iterator), next(iterator)] == RECORDS[:2]
    state = iterator.get_state()
    for _ in range(2):
        with pytest.raises(ValueError, match="truncated"):
            next(iterator)
        assert iterator.get_state() == state
    file.write_bytes(WHOLE)  # mended
    assert list(iterator) == RECORDS[2:]
