"""Disks that are really full, or read-only: clear errors, nothing left behind, and what was there stays whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.chaos.disk import own_mounts
from tests.checkpoint.small_disks import ROOMS
from tests.compiler import HURRIED
from tests.processes import ROOT

ENOUGH = ROOMS[-2:]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``small_disks.py`` has found; its folder is called ``DISK``."""
    way = own_mounts()
    if way is None:
        pytest.skip("nobody may mount anything here; test_saving.py limits the size of files instead")
    folder = tmp_path_factory.mktemp("disk")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [*way, sys.executable, "-W", "error", "-m", "tests.checkpoint.small_disks", str(folder)],
        env=os.environ | {"PYTHONPATH": path} | HURRIED,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.replace(str(folder), "DISK"))
    return result


def test_a_save_onto_a_full_disk_says_so_and_leaves_nothing(found: dict[str, Any]) -> None:
    for room in ROOMS[:-2]:
        error = found["save"][str(room)]
        assert error.startswith(f"CheckpointError: the checkpoint DISK/run/step-{2 + room:08d} could not be written: ")
        assert "OSError: [Errno 28] No space left on device" in error
        assert found["left"][str(room)] == ["manager.json", "step-00000001"]


def test_what_a_full_disk_has_stays_whole_and_it_goes_on_when_there_is_room(found: dict[str, Any]) -> None:
    assert [found["save"][str(room)] for room in ENOUGH] == [None, None]
    assert found["what is there"] == [2 + ENOUGH[-1], 2.0]
    assert found["with room again"] == 500_000


def test_a_new_folder_on_a_full_disk(found: dict[str, Any]) -> None:
    why = "the folder of checkpoints DISK/other can't be written to: No space left on device"
    assert found["a new manager"] == f"OSError: [Errno 28] {why}"
    assert found["of it"] == []


def test_a_disk_that_is_read_only(found: dict[str, Any]) -> None:
    assert found["read-only, save"] == "PermissionError: the folder DISK/run can't be written to"
    assert found["read-only, another"] == (
        "OSError: the folder DISK/third can't be made: Read-only file system (DISK/third)"
    )
    assert (found["read-only, restored"], found["value"]) == (None, 2.0)  # to read it is enough
