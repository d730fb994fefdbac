"""A checkpoint that is not whole is never taken for one: the newest whole one is used, and the log says why."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import replicax
from replicax.checkpoint import complete_checkpoint, device_blocks
from replicax.checkpoint.storage import manifest
from replicax.checkpoint.storage.manifest import _own_hash

REASONS = {
    "truncated": "bytes, and should have",
    "bit-flipped": "has other bytes than were written: its SHA-256 is",
    "emptied": "has 0 bytes, and should have",
    "file-missing": "is missing: No such file",
    "half-copied": "has no manifest.json, so it was never finished, or is half a copy",
    "no-manifest": "has no manifest.json, so it was never finished, or is half a copy",
    "manifest-truncated": "manifest.json can't be read: JSONDecodeError",
    "manifest-flipped": "manifest.json is damaged: it does not fit its own hash",
    "manifest-emptied": "manifest.json can't be read: JSONDecodeError",
    "index-flipped": "index.json has other bytes than were written|index.json can't be read",
    "index-binary": "index.json can't be read: 'utf-8' codec can't decode",
    "index-missing": "index.json is missing",
    "no-files": "has no manifest.json",
    "is-a-file": "it is a file, and no folder",
    "other-format": "it has format 99, and this version of Replicax reads up to 1",
    "another-json": "manifest.json is no manifest: it should have an object, and has a list",
    "nested": "manifest.json can't be read: ValueError: it is nested too deeply",
    "pipe": "manifest.json can't be read: ValueError: it is no regular file",
    "device": "manifest.json can't be read: ValueError: it is no regular file",
    "pipe-of-data": "can't be read: it is no regular file",
    "endless": "manifest.json can't be read: ValueError: it has more than 67108864 bytes",
    "outside": "index.json can't be read: ValueError: '../step-00000002/arrays-0' is not in the folder",
    "absolute": "/step-00000002/arrays-0' is not in the folder of the checkpoint",
    "unlisted": "index.json has v in 'other', which is not in the manifest",
    "index-unlisted": "index.json is not in the manifest",
    "loop": "Too many levels of symbolic links",
    "file-outside": "manifest.json can't be read: ValueError: '../step-00000002/index.json' is not in the folder",
}
DAMAGES = [*REASONS]


def data_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of arrays, the largest first."""
    files = [path for path in (folder / "arrays-0").rglob("*") if path.is_file()]
    return sorted(files, key=lambda path: -path.stat().st_size)


def flip(path: pathlib.Path, place: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)


def damage(folder: pathlib.Path, how: str) -> None:
    largest, manifest, index = data_files(folder)[0], folder / "manifest.json", folder / "index.json"
    if how == "truncated":
        os.truncate(largest, largest.stat().st_size - 1)
    elif how == "bit-flipped":
        flip(largest)
    elif how == "emptied":
        os.truncate(largest, 0)
    elif how == "file-missing":
        largest.unlink()
    elif how == "half-copied":
        manifest.unlink()
        largest.unlink()
    elif how == "no-manifest":
        manifest.unlink()
    elif how == "manifest-truncated":
        os.truncate(manifest, manifest.stat().st_size // 2)
    elif how == "manifest-flipped":
        manifest.write_text(manifest.read_text().replace('"step": 3', '"step": 7'))
    elif how == "manifest-emptied":
        os.truncate(manifest, 0)
    elif how == "index-flipped":
        flip(index)
    elif how == "index-binary":
        index.write_bytes(b"\xff" * index.stat().st_size)
    elif how == "index-missing":
        index.unlink()
    elif how == "no-files":
        shutil.rmtree(folder)
        folder.mkdir()
    elif how == "is-a-file":
        shutil.rmtree(folder)
        folder.write_text("a checkpoint")
    elif how == "loop":
        shutil.rmtree(folder)
        folder.symlink_to(folder)
    elif how == "another-json":
        manifest.write_text("[1, 2]")
    elif how == "nested":
        manifest.write_text("[" * 100_000)
    elif how == "pipe":
        manifest.unlink()
        os.mkfifo(manifest)
    elif how == "device":
        manifest.unlink()
        manifest.symlink_to("/dev/zero")
    elif how == "pipe-of-data":
        largest.unlink()
        os.mkfifo(largest)
    elif how == "endless":
        os.truncate(manifest, 1 << 40)
    elif how == "file-outside":
        rewrite(manifest, lambda listed: listed["files"].update({"../step-00000002/index.json": [0, ""]}))
    elif how == "index-unlisted":
        rewrite(manifest, lambda listed: listed["files"].pop("index.json"))
    elif how == "other-format":
        rewrite(manifest, lambda listed: listed.update(format=99))
    else:
        folders = {"outside": "../step-00000002/arrays-0", "absolute": f"{folder.parent}/step-00000002/arrays-0"}
        text = index.read_text().replace('"arrays-0"', json.dumps(folders.get(how, "other")))
        index.write_text(text)
        shutil.copytree(folder / "arrays-0", folder / "other")
        entry = [len(text), hashlib.sha256(text.encode()).hexdigest()]
        rewrite(manifest, lambda listed: listed["files"].update({"index.json": entry}))


def rewrite(manifest: pathlib.Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest, so that it still fits its own hash."""
    fields = json.loads(manifest.read_text())
    del fields["sha256"]
    change(fields)
    manifest.write_text(json.dumps({**fields, "sha256": _own_hash(fields)}))


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder of three checkpoints, in which ``v`` is 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("original") / "run"
    v = replicax.Variable(np.zeros(1000, np.float32))
    with replicax.CheckpointManager(replicax.Checkpoint(v=v, note="x" * 100), folder) as manager:
        for step in (1, 2, 3):
            v.assign(np.full(1000, step, np.float32))
            manager.save(step)
    return folder


@pytest.fixture
def run(original, tmp_path):
    """A copy of it, and a manager on it."""
    shutil.copytree(original, tmp_path / "run")
    v = replicax.Variable(np.zeros(1000, np.float32))
    return tmp_path / "run", v, replicax.Checkpoint(v=v, note="")


@pytest.mark.parametrize("how", DAMAGES)
def test_the_newest_whole_one_is_used(run, how, caplog) -> None:
    folder, v, checkpoint = run
    damage(folder / "step-00000003", how)
    with pytest.raises(replicax.errors.CheckpointError, match=f"step-00000003 can't be restored: .*({REASONS[how]})"):
        checkpoint.restore(folder / "step-00000003")
    assert float(v.value[0]) == 0.0
    manager = replicax.CheckpointManager(checkpoint, folder)
    with caplog.at_level(logging.WARNING, "replicax"):
        assert manager.restore_latest() == 2
    assert float(v.value[0]) == 2.0
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"passed over the checkpoint {folder}/step-00000003: ")
    assert any(reason in line for reason in REASONS[how].split("|")), line
    # The run goes on, comes to that step again, and what is there is put aside.
    manager.save(3)
    manager.close()
    assert manager.steps == (1, 2, 3)
    assert os.path.lexists(folder / "step-00000003.damaged-1")
    assert replicax.CheckpointManager(checkpoint, folder).restore_latest() == 3


def test_a_disk_that_breaks_while_bytes_are_checked(run, monkeypatch, caplog) -> None:
    folder, v, checkpoint = run
    [broken, *_] = map(str, data_files(folder / "step-00000003"))
    hashed = manifest._hash

    def breaks(path: str) -> tuple[int, str]:
        if path == broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return hashed(path)

    monkeypatch.setattr(manifest, "_hash", breaks)
    assert replicax.CheckpointManager(checkpoint, folder).restore_latest() == 2
    assert float(v.value[0]) == 2.0
    assert f"step-00000003: {broken} can't be read: Input/output error" in caplog.text


@pytest.mark.parametrize("is_large", [False, True])
def test_a_disk_that_breaks_after_bytes_were_checked(run, monkeypatch, is_large) -> None:
    folder, v, checkpoint = run
    monkeypatch.setattr(device_blocks, "LARGE", 3999 if is_large else 4000)

    def breaks(path: str) -> None:
        for file in data_files(pathlib.Path(path)):
            file.unlink()

    monkeypatch.setattr(complete_checkpoint, "problem_of", breaks)
    said = "was broken off at v: TensorStore could not read from .*step-00000003/arrays-0: .*restore another checkpoint"
    with pytest.raises(replicax.errors.CheckpointError, match=said):
        checkpoint.restore(folder / "step-00000003")
    lost = pytest.raises(replicax.errors.VariableLostError, match="the restore was broken off. Assign it a new value")
    with lost if is_large else contextlib.nullcontext():  # there is no memory for two of a large one
        assert float(v.value[0]) == 0.0


def test_every_byte_counts(run) -> None:
    """One bit, wherever it is, in whichever file."""
    folder, v, checkpoint = run
    newest = folder / "step-00000003"
    for path in sorted(p for p in newest.rglob("*") if p.is_file()):
        before = path.read_bytes()
        assert not before.startswith(b"\x80"), path  # no pickle: nothing in a checkpoint could run code
        for place in (0.0, 0.3, 0.6, 0.999):
            flip(path, place)
            with pytest.raises(replicax.errors.CheckpointError, match="can't be restored"):
                checkpoint.restore(newest)
            path.write_bytes(before)
    assert float(v.value[0]) == 0.0
    checkpoint.restore(newest)
    assert float(v.value[0]) == 3.0


def test_none_that_is_whole_is_an_error(run) -> None:
    folder, v, checkpoint = run
    for step, how in ((1, "truncated"), (2, "no-manifest"), (3, "emptied")):
        damage(folder / f"step-0000000{step}", how)
    with pytest.raises(replicax.errors.CheckpointError, match="none of the checkpoints in .* is whole") as caught:
        replicax.CheckpointManager(checkpoint, folder).restore_latest()
    for step in (1, 2, 3):
        assert f"step-0000000{step}: " in str(caught.value)
    assert float(v.value[0]) == 0.0


def test_files_of_others_do_no_harm(run) -> None:
    folder, v, checkpoint = run
    (folder / "step-00000003" / "notes.txt").write_text("our best run")
    (folder / "step-3").mkdir()
    (folder / "step-00000009.txt").write_text("")
    assert replicax.CheckpointManager(checkpoint, folder).restore_latest() == 3
    assert float(v.value[0]) == 3.0


def test_a_copy_of_a_checkpoint_is_a_checkpoint(run) -> None:
    folder, v, checkpoint = run
    shutil.copytree(folder / "step-00000002", folder / "step-00000010")
    shutil.copytree(folder / "step-00000002", folder.parent / "backup")
    assert replicax.CheckpointManager(checkpoint, folder).restore_latest() == 10
    assert float(v.value[0]) == 2.0
    shutil.rmtree(folder)
    checkpoint.restore(folder.parent / "backup")


def test_pieces_of_another_save_are_not_taken(run) -> None:
    """Files that are whole, but of two checkpoints."""
    folder, _, checkpoint = run
    second, third = (folder / f"step-0000000{n}" / "index.json" for n in (2, 3))
    ids = [json.loads(path.read_text())["id"] for path in (second, third)]
    assert len(set(ids)) == 2
    third.write_text(third.read_text().replace(ids[1], ids[0]))  # the copy of another, of the same size in any case
    with pytest.raises(replicax.errors.CheckpointError, match="its index is that of another checkpoint"):
        checkpoint.restore(folder / "step-00000003")


def test_nothing_at_all(tmp_path) -> None:
    checkpoint = replicax.Checkpoint(step=0)
    assert replicax.CheckpointManager(checkpoint, tmp_path / "run").restore_latest() is None
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*nowhere"):
        checkpoint.restore(tmp_path / "nowhere")


def test_many_damaged_ones_do_not_fill_the_log(run, caplog) -> None:
    folder, _, checkpoint = run
    for step in range(4, 104):
        (folder / f"step-{step:08d}").mkdir()
    with caplog.at_level(logging.WARNING, "replicax"):
        assert replicax.CheckpointManager(checkpoint, folder).restore_latest() == 3
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 21
    assert lines[-1] == "80 more checkpoints were passed over"
    for step in (1, 2, 3):
        shutil.rmtree(folder / f"step-{step:08d}")
    with pytest.raises(replicax.errors.CheckpointError, match=r"step-00000084: .*; and 80 more$"):
        replicax.CheckpointManager(checkpoint, folder).restore_latest()
    for step in range(4, 104):
        os.rename(folder / f"step-{step:08d}", folder / f"step-{step:08d}.unfinished-{step}")
    caplog.clear()
    assert replicax.CheckpointManager(checkpoint, folder).restore_latest() is None
    assert [record.getMessage() for record in caplog.records][20:] == ["80 more were never finished"]
