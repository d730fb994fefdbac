from __future__ import annotations

import pathlib
import pickle

import grain
import numpy as np
import pytest
from hypothesis import given, strategies as st

import replicax
from replicax.data.files.array_record import ArrayRecords
from tests.data.files.writing import write_array_records


@given(parts=st.lists(st.lists(st.binary(max_size=50), max_size=4), min_size=1, max_size=3))
def test_what_was_written_is_read(tmp_path_factory, parts) -> None:
    folder = tmp_path_factory.mktemp("array_record")
    for number, records in enumerate(parts):
        write_array_records(folder / f"{number}.array_record", records)
    (folder / "9.array_record").write_bytes(b"")
    dataset = replicax.data.array_records(folder / "*")
    records = [record for part in parts for record in part]
    assert isinstance(dataset, grain.MapDataset)
    assert len(dataset) == len(records)
    assert list(dataset) == records
    assert [dataset[i] for i in reversed(range(len(records)))] == records[::-1]
    if records:
        assert sorted(dataset.shuffle(seed=1)) == sorted(records)
        grain.experimental.assert_equal_output_after_checkpoint(dataset.to_iter_dataset())


def source(tmp_path, *parts) -> ArrayRecords:
    files = []
    for number, records in enumerate(parts):
        files.append(str(tmp_path / f"{number}"))
        write_array_records(pathlib.Path(files[-1]), records)
    return ArrayRecords(files)


def test_other_files(tmp_path) -> None:
    records = source(tmp_path, [b"a", b"b"], [], [b"c"])
    assert len(records.files) == 3
    assert [len(records.with_files([file])) for file in records.files] == [2, 0, 1]
    some = records.with_files(records.files[2:])
    assert [some[i] for i in range(len(some))] == [b"c"]
    assert len(records.with_files([])) == 0


def test_several_at_once_and_in_other_processes(tmp_path) -> None:
    records = source(tmp_path, [b"a", b"b"], [b"c", b"d"])
    assert records._getitems([3, 0, 2]) == [b"d", b"a", b"c"]
    assert repr(records) == "array_records(2 files, 4 records)"
    copy = pickle.loads(pickle.dumps(records))
    assert [copy[i] for i in range(4)] == [b"a", b"b", b"c", b"d"]


def test_records_that_come_one_by_one_are_not_counted(tmp_path) -> None:
    records = grain.MapDataset.source(source(tmp_path, [b"a", b"b"], [b"c", b"d"]))
    lengths = records.map(lambda record: np.float32(len(record)))
    strategy = replicax.MirroredStrategy(["cpu:0"])
    assert strategy.distribute_dataset(lengths.to_iter_dataset()).cardinality is None
    assert strategy.distribute_dataset(lengths.batch(2)).cardinality == 2


def test_a_name_like_a_slice(tmp_path) -> None:
    write_array_records(tmp_path / "x[0:1]", [b"a", b"b"])
    assert list(replicax.data.array_records(tmp_path / "x[0:1]")) == [b"a", b"b"]


def test_files_that_are_cut_off_or_of_another_kind(tmp_path) -> None:
    write_array_records(tmp_path / "a", [bytes(range(256)) * 40 for _ in range(20)])
    whole = (tmp_path / "a").read_bytes()
    for data in (*(whole[:-cut] for cut in (1, 1000, 65536, 70000)), b"hello", b"hello" * 40000, bytes(131072)):
        (tmp_path / "a").write_bytes(data)
        with pytest.raises(ValueError, match=r"/a: truncated, corrupt, or no ArrayRecord file \(.+\)"):
            replicax.data.array_records(tmp_path / "a")


@pytest.mark.parametrize("number", [0, 1])
def test_a_corrupt_record_is_named(tmp_path, number) -> None:
    import random

    contents = [random.Random(i).randbytes(500) for i in range(4)]
    write_array_records(tmp_path / "a", contents[:2])
    write_array_records(tmp_path / "b", contents[2:])
    data = (tmp_path / "b").read_bytes()
    at = data.index(contents[2 + number][:20])
    (tmp_path / "b").write_bytes(data[:at] + b"?" + data[at + 1 :])
    dataset = replicax.data.array_records([tmp_path / "a", tmp_path / "b"])
    right = [0, 1, 3 - number]
    assert [dataset[i] for i in right] == [contents[i] for i in right]
    with pytest.raises(ValueError, match=rf"/b: record {number} can't be read: .*hash mismatch"):
        dataset[2 + number]
    with pytest.raises(ValueError, match=rf"/b: record {number} can't be read"):
        dataset._getitems([0, 2 + number])
