from __future__ import annotations

import gzip
import math

import ml_dtypes
import numpy as np
import pytest

import replicax


@pytest.fixture
def rows(tmp_path):
    def read(text: str | bytes, **options):
        file = tmp_path / "a.csv"
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        return replicax.data.csv_rows(file, **options)

    return read


HEADER = "n,x,s\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (HEADER, []),
        (HEADER + "1,2.5,a\n", [(1, 2.5, "a")]),
        (HEADER + "1,2.5,a", [(1, 2.5, "a")]),
        ("n,x,s\r\n1,2.5,a\r\n\r\n-2,1e3,b\r\n", [(1, 2.5, "a"), (-2, 1000.0, "b")]),
        (HEADER + '1,2.5,"a,\n""b"""\n\n2,.5,"ü\r\n"\n', [(1, 2.5, 'a,\n"b"'), (2, 0.5, "ü\r\n")]),
        (HEADER + " 1 , 2.5 , a \n", [(1, 2.5, " a ")]),
        ("\ufeff" + HEADER + "1,inf,\n", [(1, math.inf, "")]),
    ],
)
def test_rows(rows, text, expected) -> None:
    for data in (text.encode(), gzip.compress(text.encode())):
        assert [tuple(row.values()) for row in rows(data)] == expected


def test_dtypes_are_worked_out(rows) -> None:
    text = "i,gap,f,nothing,big,small,word\n1,1,1.5,,9223372036854775808,-9223372036854775809,1_000\n-2,,2,,1,1,x\n"
    one, two = rows(text)
    assert {name: type(value) for name, value in one.items()} == {
        "i": np.int64,
        "gap": np.float64,
        "f": np.float64,
        "nothing": str,
        "big": str,  # as a float it would be another number
        "small": str,
        "word": str,
    }
    assert np.isnan(two["gap"])
    assert [type(v) for v in two.values()] == [type(v) for v in one.values()]


def test_an_integer_in_a_column_with_gaps_never_becomes_another_one(rows) -> None:
    big = str(2**53 + 1)
    assert [row["i"] for row in rows(f"i,j\n{big},0\n,0\n")] == [big, ""]
    iterator = iter(rows("i,x\n" + "1,1.5\n,\n" * 50 + f"2.5,{big}\n{big},1\n"))
    *_, last = [next(iterator) for _ in range(101)]
    assert last == {"i": 2.5, "x": 2.0**53}  # among other real numbers it is rounded, as they are
    with pytest.raises(ValueError, match=f"line 103: column 'i': '{big}' is not float64.*dtypes={{'i': str}}"):
        next(iterator)


def test_what_a_column_holds_does_not_depend_on_who_reads_it(tmp_path) -> None:
    """A worker that gets the second file alone makes the same of it."""
    (tmp_path / "1.csv").write_text("x\n1.5\n")
    (tmp_path / "2.csv").write_text("x\n2\n")
    dataset = replicax.data.csv_rows(tmp_path / "*.csv")
    [row] = dataset.with_files(dataset.files[1:])
    assert type(row["x"]) is np.float64


@pytest.mark.parametrize(
    ("dtype", "text", "expected"),
    [
        (np.int8, "-7", np.int8(-7)),
        ("uint16", "+7", np.uint16(7)),
        (np.float32, "0.1", np.float32(0.1)),
        (ml_dtypes.bfloat16, "0.5", ml_dtypes.bfloat16(0.5)),
        (float, "", None),
        (bool, "True", np.bool_(True)),
        (bool, "0", np.bool_(False)),
        (str, "007", "007"),
        ("datetime64[D]", "2026-11-20", np.datetime64("2026-11-20")),
    ],
)
def test_dtypes_that_are_asked_for(rows, dtype, text, expected) -> None:
    [row] = rows(f"a,b\n{text},0\n", dtypes={"a": dtype})
    if expected is None:
        assert np.isnan(row["a"])
    else:
        assert row["a"] == expected
        assert type(row["a"]) is type(expected)
    assert type(row["b"]) is np.int64


def test_names_and_columns(tmp_path, rows) -> None:
    assert list(rows("1,2\n3,4\n", names=["a", "b"], columns=["b"])) == [{"b": 2}, {"b": 4}]
    assert list(rows("1;2\n", names=["a", "b"], delimiter=";", dtypes=np.float32)) == [{"a": 1, "b": 2}]
    (tmp_path / "b.csv").write_text("y,x\n1,2\n")
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    both = list(replicax.data.csv_rows(tmp_path / "*.csv"))
    assert both == [{"x": 1, "y": 2}, {"x": 2, "y": 1}]
    assert list(both[0]) == list(both[1])


@pytest.mark.parametrize(
    ("text", "good", "message"),
    [
        ("x,s\n1,a\n2\n", 1, r"line 3: 2 fields are expected.*got 1: '2'"),
        ("x,s\n1,a\n\n2,b,c\n", 1, r"line 4: 2 fields are expected.*got 3: '2,b,c'"),
        ('x,s\n1,"a\nb"\n2,"c\n', 1, "line 4: a quote is opened, and not closed before the file ends"),
        ('x,s\n1,a\n2,"b"c\n', 1, r"line 3: ',' expected after '\"'"),
        ("x,s\n1,a\n2,b\rc\n", 1, "line 3: new-line character seen in unquoted field"),
    ],
)
def test_rows_that_are_none(rows, tmp_path, text, good, message) -> None:
    # The first 100 rows are looked at when the dataset is made, so the bad one stands behind them.
    dataset = rows("x,s\n" + "0,z\n" * 100)
    (tmp_path / "a.csv").write_text(text)
    iterator = iter(dataset)
    for _ in range(good):
        next(iterator)
    state = iterator.get_state()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"a\.csv: " + message):
            next(iterator)
        assert iterator.get_state() == state
    with pytest.raises(ValueError, match=r"a\.csv: " + message):
        rows(text)


def test_a_quote_that_takes_the_rest_of_the_file(rows) -> None:
    with pytest.raises(ValueError, match=r"line 2: field larger than field limit .* csv.field_size_limit"):
        rows('x\n"' + "a" * 200_000 + "\n")


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("i", "2.5", r"'2.5' is not int64, which is what the first rows hold\. .*dtypes={'i': float}"),
        ("i", "", r"'' is not int64.*dtypes={'i': float}"),
        ("i", "many", r"'many' is not int64.*dtypes={'i': str}"),
        ("i", "99999999999999999999", r".* is not int64"),
        ("i", "1_000", r"'1_000' is not int64"),
        ("i", "\u0661", r".* is not int64"),
        ("f", "much", r"'much' is not float64.*dtypes={'f': str}"),
        ("b", "yes", r"'yes' is not bool\. Mend the file"),
        ("u", "300", r"'300' is not uint8\."),
        ("q", "8", r"'8' is not int4\."),
        ("f", "1e400", r"'1e400' is not float64"),
        ("h", "70000", r"'70000' is not float16\."),
        ("e", "1000", r"'1000' is not float8_e4m3fn\."),
        ("t", "", r"'' is not datetime64\[D\]\."),
    ],
)
def test_values_that_are_none(rows, column, value, message) -> None:
    good = {"i": "1", "f": "1.5", "b": "true", "u": "255", "q": "7", "h": "-inf", "e": "nan", "t": "2026-11-20"}
    lines = [",".join(good), *[",".join(good.values())] * 101, ",".join((good | {column: value}).values())]
    dtypes = {"b": bool, "u": np.uint8, "q": ml_dtypes.int4, "h": np.float16, "e": ml_dtypes.float8_e4m3fn}
    dtypes["t"] = "datetime64[D]"
    iterator = iter(rows("\n".join(lines), dtypes=dtypes))
    for _ in range(101):
        next(iterator)
    state = iterator.get_state()
    with pytest.raises(ValueError, match=rf"a\.csv: line 103: column '{column}': {message}"):
        next(iterator)
    assert iterator.get_state() == state


@pytest.mark.parametrize(
    ("text", "options", "error", "message"),
    [
        (
            "a,b\n",
            {"columns": ["c"]},
            ValueError,
            r"columns names \['c'\], but the files have the columns \['a', 'b'\]",
        ),
        ("a,b\n", {"columns": ["a", "a"]}, ValueError, r"columns has the columns \['a'\] more than once"),
        ("a,b\n", {"columns": []}, ValueError, r"columns must be a list of at least one column, got \[\]"),
        ("a,b\n", {"columns": "a"}, ValueError, "columns must be a list of at least one column, got 'a'"),
        ("a,b\n", {"dtypes": {"c": int}}, ValueError, r"dtypes names \['c'\]"),
        ("a,b\n", {"dtypes": {"a": "speed"}}, TypeError, "dtypes: 'a': 'speed' is not a dtype"),
        ("a,b\n", {"dtypes": complex}, TypeError, "dtypes: 'a': text can't be read as complex128"),
        ("a,a\n", {}, ValueError, r"a\.csv: the header row has the columns \['a'\] more than once"),
        ("1,2\n", {"names": ["a", "a"]}, ValueError, r"names has the columns \['a'\] more than once"),
        ("1,2\n", {"names": ["a"]}, ValueError, r"a\.csv: line 1: 1 fields are expected"),
        ("a,b\n", {"delimiter": "tab"}, ValueError, "delimiter must be one character"),
        ("a,b\n", {"encoding": "utf-16"}, ValueError, "csv_rows: in encoding 'utf-16'"),
        (b"a,b\n\xff,1\n", {}, ValueError, r"a\.csv: byte 4: b'\\xff' is not utf-8.*latin-1'\)\."),
    ],
)
def test_what_is_said_when_the_dataset_is_made(rows, text, options, error, message) -> None:
    with pytest.raises(error, match=message):
        rows(text, **options)


def test_the_first_rows_may_be_in_several_files(tmp_path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "b.csv").write_text("")
    (tmp_path / "c.csv").write_text("y,x\n2.5,1\n" + "2,1\n" * 98 + "2,1.5\n")  # its last row is number 101
    iterator = iter(replicax.data.csv_rows(tmp_path / "*.csv"))
    rows = [next(iterator) for _ in range(100)]
    assert {type(row["y"]) for row in rows} == {np.float64}
    assert {type(row["x"]) for row in rows} == {np.int64}
    with pytest.raises(ValueError, match=r"c\.csv: line 101: column 'x': '1\.5' is not int64"):
        next(iterator)


@pytest.mark.parametrize("count", [1, 100])
def test_files_with_other_columns(tmp_path, count) -> None:
    """They are found at once if they have some of the first 100 rows."""
    (tmp_path / "a.csv").write_text("x,y\n" + "1,2\n" * count)
    (tmp_path / "b.csv").write_text("x,z\n1,2\n")
    read: list[object] = []
    with pytest.raises(ValueError, match=r"b\.csv: every file .* \['x', 'y'\], .* \(missing: \['y'\], more: \['z'\]\)"):
        read.extend(replicax.data.csv_rows(tmp_path / "*.csv"))
    assert len(read) == (count if count == 100 else 0)


def test_lines_are_still_counted_after_a_restart(rows) -> None:
    dataset = rows("x\n" + "1\n" * 101 + '\n2\n"a\nb"\n')
    iterator = iter(dataset)
    for _ in range(101):
        next(iterator)
    restored = iter(dataset)
    restored.set_state(iterator.get_state())
    assert next(restored) == {"x": 2}
    with pytest.raises(ValueError, match="line 105: column 'x'"):
        next(restored)
