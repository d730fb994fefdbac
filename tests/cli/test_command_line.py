"""Whether a file can be written is found out without changing anything."""

from __future__ import annotations

import errno

from replicax.cli.command_line import why_not_writable, written


def test_what_speaks_against_writing(tmp_path, monkeypatch) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("kept")
    assert why_not_writable(new) is None
    assert why_not_writable(old) is None
    assert not new.exists()
    assert old.read_text() == "kept"
    assert why_not_writable(tmp_path) == "it is a folder"
    assert why_not_writable(tmp_path / "none" / "x") == f"there is no folder {tmp_path / 'none'}"
    assert why_not_writable(old / "x") == f"there is no folder {old}"
    assert why_not_writable(tmp_path / ("x" * 999)) == "File name too long"

    def refused(self, mode):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(type(old), "open", refused)  # whoever is root may write everywhere
    assert why_not_writable(old) == "Permission denied"


def test_what_fails_in_writing(tmp_path) -> None:
    assert written(tmp_path / "x", lambda path: path.write_text("x")) is None
    assert written(tmp_path, lambda path: path.write_text("x")) == f"{tmp_path}: can't be written (Is a directory)"
