from __future__ import annotations

import gzip

import pytest
from hypothesis import assume, given, strategies as st

import replicax


def lines(tmp_path, data: bytes, name: str = "a.txt", **options):
    (tmp_path / name).write_bytes(data)
    return list(replicax.data.text_lines(tmp_path / name, **options))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a", ["a"]),
        (b"a\n\nb\n", ["a", "", "b"]),
        (b"a\r\nb\r\n\r\nc", ["a", "b", "", "c"]),
        (b"a\rb\n\r\r\n", ["a\rb", "\r"]),  # a lone \r is no line end
        ("ü\u2028ñ\x0b日本\x85🎉\n".encode(), ["ü\u2028ñ\x0b日本\x85🎉"]),  # nor is what str.splitlines takes for one
        (b"\xef\xbb\xbfa\n", ["\ufeffa"]),
    ],
)
def test_where_lines_end(tmp_path, data, expected) -> None:
    assert lines(tmp_path, data) == expected
    assert lines(tmp_path, gzip.compress(data), "a.txt.gz") == expected
    assert lines(tmp_path, gzip.compress(data), "no-suffix") == expected  # by the content


@given(
    text=st.text(st.characters(codec="iso2022_jp", exclude_characters="\x1b")),
    encoding=st.sampled_from(["utf-8", "iso2022_jp", "euc_jp"]),
)
def test_encodings(tmp_path_factory, text, encoding) -> None:
    # A shift sequence ends with the line, as its standard wants it.
    parts = text.replace("\r", "").split("\n")
    assume(text.encode(encoding).decode(encoding) == text)  # EUC-JP writes a yen sign as a backslash
    data = b"".join(part.encode(encoding) + b"\n" for part in parts)
    assert lines(tmp_path_factory.mktemp("text"), data, encoding=encoding) == parts


def test_a_byte_order_mark(tmp_path) -> None:
    assert lines(tmp_path, b"\xef\xbb\xbfa\n\xef\xbb\xbfb", encoding="utf-8-sig") == ["a", "\ufeffb"]
    assert lines(tmp_path, b"\xef\xbb\xbf", encoding="utf-8-sig") == [""]
    assert lines(tmp_path, b"\xef\xbb\xbf\n", encoding="utf-8-sig") == [""]
    with pytest.raises(ValueError, match="byte 4: "):
        lines(tmp_path, b"\xef\xbb\xbfa\xff\n", encoding="utf-8-sig")


def test_bytes_that_are_no_text(tmp_path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"good\nnot \xff good\nrest\n")
    iterator = iter(replicax.data.text_lines(file))
    assert next(iterator) == "good"
    state = iterator.get_state()
    for _ in range(2):  # the error doesn't go away
        with pytest.raises(
            ValueError, match=r"a\.txt: byte 9: b'\\xff' is not utf-8: invalid start byte.*errors='replace'"
        ):
            next(iterator)
        assert iterator.get_state() == state
    assert list(replicax.data.text_lines(file, errors="replace")) == ["good", "not \ufffd good", "rest"]
    assert list(replicax.data.text_lines(file, encoding="latin-1")) == ["good", "not ÿ good", "rest"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoding": "utf-16"}, r"in encoding 'utf-16' a line feed is .*convert the files to UTF-8"),
        ({"encoding": "utf-99"}, "text_lines: unknown encoding: utf-99"),
        ({"errors": "forget"}, "text_lines: unknown error handler name 'forget'"),
    ],
)
def test_encodings_that_do_not_go(tmp_path, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        lines(tmp_path, b"", **options)


def test_gzip_that_is_cut_off_or_damaged(tmp_path) -> None:
    file = tmp_path / "a.gz"
    whole = gzip.compress(b"".join(b"line %d\n" % i for i in range(1000)))
    for cut in (5, 12, len(whole) // 2, len(whole) - 9, len(whole) - 5, len(whole) - 1):
        file.write_bytes(whole[:cut])
        for skipped in (0, 1000):
            with pytest.raises(
                ValueError, match=r"a\.gz: the gzip stream is truncated or corrupt near byte \d+ of the file"
            ):
                list(replicax.data.text_lines(file).with_positions({str(file): skipped}))
    for place in (len(whole) // 2, len(whole) - 6, len(whole) - 2):  # data, checksum, length
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"a\.gz: (the gzip stream is truncated or corrupt|byte \d+)"):
            list(replicax.data.text_lines(file))
    file.write_bytes(b"plain\n")
    with pytest.raises(ValueError, match=r"a\.gz: named like a gzip file, but begins with b'plai'"):
        list(replicax.data.text_lines(file))
    file.write_bytes(b"")
    assert list(replicax.data.text_lines(file)) == []
