"""Reads files, and JSON in them, that another process may have written or damaged: only regular files of bounded size.

A path may also name a pipe, which would block its reader, or a device, which has no end.
"""

from __future__ import annotations

import json
import os
import stat
from typing import Any

MOST_BYTES = 64 << 20
"""More than any file of this kind has."""


def read_regular(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """The bytes of a file.

    Raises:
      OSError: it can't be read.
      ValueError: it is not a regular file, or has more than ``most`` bytes.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        check_regular(found)
        if found.st_size > most:
            raise ValueError(f"it has more than {most} bytes")
        return file.read(most)


def check_regular(found: os.stat_result) -> None:
    """Raise a ValueError unless ``found`` is the status of a regular file."""
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no regular file")


def parsed(text: str | bytes) -> Any:
    """Parse ``text`` as JSON; raises a ValueError if it is not JSON, or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: str | os.PathLike[str]) -> Any:
    """Parse a file as JSON; raises an OSError or ValueError as :func:`read_regular` and :func:`parsed` do."""
    return parsed(read_regular(path))
