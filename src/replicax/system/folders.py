"""Makes folders, and names the files in them that can't be written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def make_folder(path: str) -> None:
    """Create a folder, with its parents; raises an OSError if it can't be created or written to."""
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        part = path
        while not os.path.lexists(part):
            part = os.path.dirname(part)
        kind = "file" if os.path.exists(part) else "link to nothing"
        raise NotADirectoryError(f"there can be no folder {path}: {part} is a {kind}") from None
    except OSError as error:
        raise type(error)(f"the folder {path} can't be made: {error.strerror} ({error.filename})") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(f"the folder {path} can't be written to")


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Enclose writing to a file: an OSError without a file's name, as that of a full disk, gets this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise
