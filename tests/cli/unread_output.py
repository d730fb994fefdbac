"""Standard output that nobody reads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def unread_output() -> Iterator[None]:
    """Standard output is a pipe whose reader has ended, as after ``| head``."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as output, contextlib.redirect_stdout(output):
        yield
