"""Files that another process may have written or damaged, and JSON in them: regular files of bounded size only.

A path may also lead to a pipe, which would block its reader, or to a device, which has no end.
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
      ValueError: it is no regular file, or has more than ``most`` bytes.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        check_regular(found)
        if found.st_size > most:
            raise ValueError(f"it has more than {most} bytes")
        return file.read(most)


def check_regular(found: os.stat_result) -> None:
    """Raise unless it is that of a regular file.

    Raises:
      ValueError: it is another.
    """
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no regular file")


def parsed(text: str | bytes) -> Any:
    """What ``text`` says, in JSON.

    Raises:
      ValueError: it is no JSON, or is nested more deeply than can be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: str | os.PathLike[str], most: int = MOST_BYTES) -> Any:
    """What a file says, in JSON.

    Raises:
      OSError, ValueError: see :func:`read_regular` and :func:`parsed`.
    """
    return parsed(read_regular(path, most))
