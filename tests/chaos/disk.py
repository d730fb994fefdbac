"""A small disk that can really be filled: a file system in memory, in a name space of mounts of our own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SIZE = "64m"
_INSIDE = "CHAOS_MOUNTS"
_WAYS = (
    ("unshare", "--mount", "--propagation", "private"),
    ("unshare", "--user", "--map-root-user", "--mount", "--propagation", "private"),
)
"""As root, and as somebody who may have a name space of users."""


def own_mounts() -> tuple[str, ...] | None:
    """What to put before a command so that nobody else sees its mounts, which end with it; ``None``: not allowed."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return None
    for way in _WAYS:
        mount = [*way, "mount", "-t", "tmpfs", "none", tempfile.gettempdir()]
        if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
            return way
    return None


def enter_own_mounts() -> None:
    """Run this program again, in place of this process, with mounts of its own; where that is allowed."""
    if _INSIDE not in os.environ and (way := own_mounts()) is not None:
        os.environ[_INSIDE] = "1"
        os.execvp(way[0], [*way, sys.executable, "-m", "tests.chaos", *sys.argv[1:]])


def mounted(folder: Path) -> bool:
    """Mount a small disk at a folder; whether that could be done."""
    folder.mkdir(parents=True, exist_ok=True)
    if _INSIDE not in os.environ:
        return False
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(folder)], check=True)
    return True
