"""Saves onto real disks that are full or read-only: file systems in memory, which only this process sees."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import replicax

SIZE = 4 << 20
VALUES = 100_000
ROOMS = 0, 4096, 16_384, 200_000, 412_000, 416_500, 420_500, 425_000


def mount(folder: pathlib.Path, *options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "none", str(folder)], check=True)


def fill(folder: pathlib.Path, room: int) -> None:
    """Leave so many bytes free."""
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_bsize
    with (folder / "filler").open("wb") as file:
        file.write(b"x" * (free - room))


def error(do: Callable[[], Any]) -> str | None:
    try:
        do()
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return None


def main(folder: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = {"save": {}, "left": {}}
    v = replicax.Variable(np.ones(VALUES, np.float32))
    checkpoint = replicax.Checkpoint(v=v)
    mount(folder, f"size={SIZE}")
    manager = replicax.CheckpointManager(checkpoint, folder / "run", max_to_keep=2)
    manager.save(1)
    manager.wait()
    v.assign(np.full(VALUES, 2, np.float32))
    # From nothing at all to all but the last files; in the end there is enough.
    for room in ROOMS:
        fill(folder, room)
        found["save"][room] = error(lambda room=room: [manager.save(2 + room), manager.wait()])
        (folder / "filler").unlink()
        found["left"][room] = sorted(path.name for path in (folder / "run").iterdir())
    fill(folder, 0)
    found["a new manager"] = error(lambda: replicax.CheckpointManager(checkpoint, folder / "other"))
    found["of it"] = sorted(path.name for path in (folder / "other").iterdir())
    found["what is there"] = (
        replicax.CheckpointManager(checkpoint, folder / "run").restore_latest(),
        float(v.numpy()[0]),
    )
    (folder / "filler").unlink()
    manager = replicax.CheckpointManager(checkpoint, folder / "run", max_to_keep=2)
    manager.restore_latest()
    manager.save(500_000)
    manager.close()
    found["with room again"] = replicax.CheckpointManager(checkpoint, folder / "run").restore_latest()
    mount(folder, "remount", "ro")
    v.assign(np.full(VALUES, 3, np.float32))
    found["read-only, save"] = error(lambda: [manager.save(600_000), manager.wait()])
    found["read-only, another"] = error(lambda: replicax.CheckpointManager(checkpoint, folder / "third"))
    found["read-only, restored"] = error(lambda: checkpoint.restore(folder / "run" / "step-00500000"))
    found["value"] = float(v.numpy()[0])
    return found


if __name__ == "__main__":
    print(json.dumps(main(pathlib.Path(sys.argv[1]))))
