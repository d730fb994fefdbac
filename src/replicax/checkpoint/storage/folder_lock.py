"""The lock of a manager's folder, which managers share while they save.

A manager that gets it alone knows that every unfinished checkpoint in the folder is of a save that was broken off.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

NAME = "manager.json"


@contextlib.contextmanager
def locked(folder: str, alone: bool = False) -> Iterator[bool]:
    """Lock a manager's folder, together with others or alone; alone it does not wait for them.

    Yields whether others have no lock now. File systems without locks can't tell.
    """
    is_free = True
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(os.path.join(folder, NAME), "rb+" if alone else "rb"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # in processes that were forked meanwhile, too
        except BlockingIOError:
            is_free = False
        except OSError:
            pass  # a file system without locks
        yield is_free
