from __future__ import annotations

import os
import pathlib

import pytest

import replicax
from replicax.data.files.paths import expand


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    for name in ["b.txt", "a.txt", "c.csv", "deep/d.txt", "deep/deeper/e.txt", "data[1].txt", "ü ñ 日本.txt"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("a.txt", ["a.txt"]),
        (pathlib.Path("a.txt"), ["a.txt"]),
        ("?.txt", ["a.txt", "b.txt"]),
        ("**/*.txt", ["a.txt", "b.txt", "data[1].txt", "deep/d.txt", "deep/deeper/e.txt", "ü ñ 日本.txt"]),
        ("**/deeper/*", ["deep/deeper/e.txt"]),
        ("[ab].*", ["a.txt", "b.txt"]),
        ("data[1].txt", ["data[1].txt"]),  # there is a file of that very name
        ("ü*", ["ü ñ 日本.txt"]),
        (["b.txt", "a.txt"], ["a.txt", "b.txt"]),
        (
            ["b.txt", "*.txt", "./a.txt", "[ab].txt"],
            ["a.txt", "b.txt", "data[1].txt", "ü ñ 日本.txt"],
        ),
        ({"a.txt", "c.csv"}, ["a.txt", "c.csv"]),
        ((f for f in ["a.txt"]), ["a.txt"]),
    ],
)
def test_what_is_meant(folder, files, expected) -> None:
    assert expand(files, "text_lines") == tuple(expected)


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        (
            "no*.txt",
            FileNotFoundError,
            r"text_lines: no file matches 'no\*.txt'; looked in '.*', where there are 6 other",
        ),
        (
            "no.txt",
            FileNotFoundError,
            r"there is no file 'no.txt'; looked in '.*', where there are 6 .*: a.txt, b.txt, c",
        ),
        ("gone/*/x.txt", FileNotFoundError, r"no file matches .*; there is no directory '.*/gone', only '[^']*'$"),
        ("deep/**/*.csv", FileNotFoundError, r"no file matches 'deep/\*\*/\*.csv'; looked in '.*/deep', where"),
        ("dee*", FileNotFoundError, r"no file matches 'dee\*'"),  # a directory is none
        ("", FileNotFoundError, r"there is no file ''"),
        (["a.txt", "x.txt"], FileNotFoundError, r"there is no file 'x.txt'"),
        (
            "deep",
            IsADirectoryError,
            r"'deep' is a directory; to read the files in it, say 'deep/\*', and 'deep/\*\*/\*'",
        ),
        ([], ValueError, "text_lines: files is an empty list"),
        (["a.txt", pathlib.Path("deep/../a.txt")], ValueError, r"text_lines: files has 'a.txt' twice, and each"),
        ("gs://bucket/a.txt", ValueError, "'gs://bucket/a.txt' is an address, and only files of this machine are read"),
        (3, TypeError, "text_lines: files must be a path, a glob, or a list of these, got 3"),
        (b"a.txt", TypeError, "got b'a.txt'"),
        ([3], TypeError, "a file is named by a str or a PathLike of str, got 3"),
    ],
)
def test_what_is_not_there(folder, files, error, message) -> None:
    with pytest.raises(error, match=message):
        replicax.data.text_lines(files)


def test_a_file_is_the_same_by_its_whole_path(folder, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert expand("~/a.txt", "text_lines") == (str(folder / "a.txt"),)
    assert expand(["a.txt", folder / "[ab].txt"], "text_lines") == (str(folder / "b.txt"), "a.txt")
    with pytest.raises(ValueError, match="twice, and each"):
        expand(["a.txt", folder / "a.txt"], "text_lines")


def test_an_empty_directory(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"looked in '.*', which is empty"):
        replicax.data.tfrecords(tmp_path / "*")


@pytest.mark.parametrize("read", ["text_lines", "csv_rows", "tfrecords", "parquet_rows", "array_records"])
def test_every_function_says_its_name(tmp_path, read) -> None:
    with pytest.raises(FileNotFoundError, match=f"^{read}: no file matches"):
        getattr(replicax.data, read)(tmp_path / "*")


def test_a_file_that_goes_away_is_named(folder) -> None:
    dataset = replicax.data.text_lines("a.txt")
    os.remove("a.txt")
    with pytest.raises(FileNotFoundError, match="a.txt"):
        next(iter(dataset))
