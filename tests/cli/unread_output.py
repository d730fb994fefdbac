"""Standard output whose reader has closed it."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator


@contextlib.contextmanager
def unread_output() -> Iterator[None]:
    """Standard output is a pipe whose reader has ended, as after ``| head``; it is unbuffered, as in ``python -u``."""
    reader, writer = os.pipe()
    os.close(reader)
    with io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True) as output, contextlib.redirect_stdout(output):
        yield
