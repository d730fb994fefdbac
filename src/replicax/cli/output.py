"""Files that commands write: checked before the work, and plainly refused after it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

NOT_WRITTEN = 3
"""The exit status if the work is done, and a file could not be written."""


def why_not_writable(path: Path) -> str | None:
    """Why ``path`` can't be written, as far as can be told beforehand; ``None`` if nothing speaks against it.

    An existing file is left as it is, and none is left behind.
    """
    try:
        if path.is_dir():
            return "it is a folder"
        if not path.parent.is_dir():
            return f"there is no folder {path.parent}"
        is_there = os.path.lexists(path)
        if is_there and not path.is_file():
            return None  # a device, a pipe or a link to nothing, which trying could change
        with path.open("ab"):
            pass
        if not is_there:
            path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None


def written(path: Path, write: Callable[[Path], object]) -> str | None:
    """Have ``path`` written; returns why that failed, if it did."""
    try:
        write(path)
    except OSError as error:
        return f"{path}: can't be written ({error.strerror or error})"
    return None
