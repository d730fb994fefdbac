from __future__ import annotations

import datetime
import decimal
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import replicax


def rows(tmp_path, columns, name="a.parquet", **options):
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table, tmp_path / name, **options)
    return replicax.data.parquet_rows(tmp_path / name)


@pytest.mark.parametrize(
    ("column", "first"),
    [
        (pa.array([1, 2], pa.int8()), np.int8(1)),
        (pa.array([1, 2], pa.uint64()), np.uint64(1)),
        (pa.array([True, False]), np.bool_(True)),
        (pa.array([0.5, None], pa.float32()), np.float32(0.5)),
        (pa.array([np.float16(0.5), np.float16(1)], pa.float16()), np.float16(0.5)),
        (pa.array(["ü", ""]), "ü"),
        (pa.array(["a", "b"]).dictionary_encode(), "a"),
        (pa.array([b"\0", b""]), b"\0"),
        (pa.array([b"ab", b"cd"], pa.binary(2)), b"ab"),
        (pa.array([datetime.date(2026, 11, 20)] * 2), np.datetime64("2026-11-20")),
        (pa.array([0, 1], pa.timestamp("us")), np.datetime64(0, "us")),
        (pa.array([7, 1], pa.duration("ms")), np.timedelta64(7, "ms")),
        (pa.array([[1, 2], []], pa.list_(pa.int32())), np.array([1, 2], np.int32)),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.float32(), 2)), np.array([1, 2], np.float32)),
        (pa.array([[[1], [2]], [[3]]], pa.large_list(pa.list_(pa.int64()))), np.array([[1], [2]])),
        (pa.array([["a", "b"], []]), np.array(["a", "b"], object)),
        (pa.array([[b"\0"], []]), np.array([b"\0"], object)),
        (pa.array([[], [[1]]], pa.list_(pa.list_(pa.int16()))), np.array([], np.int16)),
        (pa.array([[], [[0]]], pa.list_(pa.list_(pa.timestamp("us", "UTC")))), np.array([], "datetime64[us]")),
        (pa.array([[], [[0]]], pa.list_(pa.list_(pa.date32()))), np.array([], "datetime64[D]")),
        (pa.array([[{"x": 1}], []]), np.array([{"x": 1}], object)),
        (pa.array([{"x": 1, "y": [0.5]}, {"x": 2, "y": []}]), {"x": np.int64(1), "y": np.array([0.5])}),
    ],
    ids=str,
)
def test_types(tmp_path, column, first) -> None:
    got, _ = rows(tmp_path, {"c": column})
    np.testing.assert_equal(got["c"], first)
    if isinstance(first, np.ndarray | np.generic):
        assert got["c"].dtype == first.dtype
    assert type(got["c"]) is type(first)


def test_missing_values(tmp_path) -> None:
    got = list(rows(tmp_path, {"x": pa.array([0.5, None]), "l": pa.array([[0.5, None], []], pa.list_(pa.float64()))}))
    assert np.isnan(got[1]["x"])
    assert np.isnan(got[0]["l"][1])
    for column, message in [
        (pa.array([1, None]), r"column 'c' is missing \(null\) in row 1"),
        (pa.array(["a", None]), r"column 'c' is missing \(null\) in row 1"),
        (pa.array([[1], None]), r"column 'c' is missing \(null\) in row 1"),
        (pa.array([[1], [2, None]]), r"column 'c' has a list with a missing \(null\) entry in row 1"),
        (pa.array([[1, 2], [None]]), r"column 'c' has a list with a missing \(null\) entry in row 1"),
        (pa.array([{"x": 1}, {"x": None}]), r"column 'c', field 'x', is missing \(null\) in row 1"),
        (pa.array([[[1], [2, 3]]]), r"column 'c': the lists in the list of row 0 differ in length"),
    ]:
        with pytest.raises(ValueError, match=r"a\.parquet: " + message):
            list(rows(tmp_path, {"c": column}))


def test_the_row_of_a_missing_value_is_that_of_the_file(tmp_path) -> None:
    for column in (
        [*range(3000), None],
        [[i] for i in range(3000)] + [[None]],
        [[[i]] for i in range(3000)] + [[[1], []]],
    ):
        dataset = rows(tmp_path, {"c": pa.array(column)}, row_group_size=1000)
        for start in (0, 10, 1500, 2999):
            with pytest.raises(ValueError, match="row 3000"):
                list(dataset.with_positions({dataset.files[0]: start}))


@pytest.mark.parametrize(
    "column",
    [
        pa.array([decimal.Decimal("1.5")]),
        pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
        pa.array([datetime.time(1)]),
        pa.array([None]),
        pa.array([{"x": [decimal.Decimal("1.5")]}]),
    ],
    ids=lambda column: str(column.type),
)
def test_types_without_a_numpy_form(tmp_path, column) -> None:
    with pytest.raises(TypeError, match=r"a\.parquet: column 'c'.* has no NumPy form"):
        rows(tmp_path, {"c": column})


@pytest.mark.parametrize("size", [1, 999, 1000, 1024, 5000])
def test_restarts_at_row_groups_and_batches(tmp_path, size) -> None:
    dataset = rows(tmp_path, {"i": pa.array(range(5000))}, row_group_size=size if size > 1 else 100)
    for at in (0, 1, 1023, 1024, 1025, 2999, 3000, 4999, 5000):
        restored = iter(dataset.with_positions({dataset.files[0]: at}))
        assert next(restored, {"i": None})["i"] == (at if at < 5000 else None)
        other = iter(dataset)
        other.set_state(restored.get_state())
        assert [row["i"] for row in other] == list(range(min(at + 1, 5000), 5000))


def test_a_row_group_is_not_held_whole(tmp_path) -> None:
    """8 MB of numbers in one row group; Arrow holds a fraction of that while they are read."""
    dataset = rows(tmp_path, {"x": np.random.default_rng(0).random(1_000_000)}, row_group_size=1_000_000)
    iterator = iter(dataset)
    before = pa.total_allocated_bytes()
    next(iterator)
    held = pa.total_allocated_bytes() - before
    iterator.close()
    assert held < 4_000_000


def test_columns(tmp_path) -> None:
    rows(tmp_path, {"a": [1], "b": [2], "c": [3]})
    assert list(replicax.data.parquet_rows(tmp_path / "*", columns=["c", "a"])) == [{"c": 3, "a": 1}]
    with pytest.raises(ValueError, match=r"columns names \['d'\], but the file has \['a', 'b', 'c'\]"):
        replicax.data.parquet_rows(tmp_path / "*", columns=["d"])
    with pytest.raises(ValueError, match=r"parquet_rows: columns has the columns \['a'\] more than once"):
        replicax.data.parquet_rows(tmp_path / "*", columns=["a", "b", "a"])
    twice = tmp_path / "twice.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], names=["a", "a", "b"]), twice)
    assert list(replicax.data.parquet_rows(twice, columns=["b"])) == [{"b": 3}]
    with pytest.raises(ValueError, match=r"twice\.parquet has the columns \['a'\] more than once"):
        replicax.data.parquet_rows(twice)
    for wrong, shown in (([], r"\[\]"), ("ab", "'ab'")):
        with pytest.raises(ValueError, match=f"columns must be a list of at least one column, got {shown}"):
            replicax.data.parquet_rows(tmp_path / "*", columns=wrong)


def test_each_file_is_opened_once_to_be_read(tmp_path, monkeypatch) -> None:
    dataset, opened = rows(tmp_path, {"x": [1, 2]}), []
    monkeypatch.setattr(pq, "ParquetFile", lambda *a, _open=pq.ParquetFile, **o: opened.append(a) or _open(*a, **o))
    assert [row["x"] for row in dataset] == [1, 2]
    assert len(opened) == 1


def test_files_with_other_columns(tmp_path) -> None:
    rows(tmp_path, {"x": [1]})
    rows(tmp_path, {"x": [1.5]}, "b.parquet")
    iterator = iter(replicax.data.parquet_rows(tmp_path / "*"))
    next(iterator)
    with pytest.raises(ValueError, match=r"b\.parquet: every file .* {'x': 'int64'}, but here are {'x': 'double'}"):
        next(iterator)


def test_damaged_files(tmp_path) -> None:
    file = tmp_path / "a.parquet"
    column = np.random.default_rng(0).integers(0, 1 << 60, 5000)
    dataset = rows(tmp_path, {"i": column}, use_dictionary=False, write_page_checksum=True)
    whole = file.read_bytes()
    for cut in (len(whole) // 2, len(whole) - 20, len(whole) - 1, 3):
        file.write_bytes(whole[:cut])
        for read in (lambda: replicax.data.parquet_rows(file), lambda: next(iter(dataset))):
            with pytest.raises(ValueError, match=r"a\.parquet: truncated, corrupt, or no Parquet file"):
                read()
    file.write_bytes(whole[:20000] + bytes([whole[20000] ^ 1]) + whole[20001:])
    iterator = iter(dataset)
    with pytest.raises(ValueError, match=r"a\.parquet: corrupt in the 1024 rows from row \d+"):
        list(iterator)
    state = iterator.get_state()
    with pytest.raises(ValueError, match=r"a\.parquet: corrupt"):
        next(iterator)
    assert iterator.get_state() == state


def test_without_pyarrow(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"parquet_rows needs the package pyarrow, .*'replicax\[parquet\]'"):
        replicax.data.parquet_rows(tmp_path / "*")
