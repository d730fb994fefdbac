"""Environment variables that hold for a while, and the one for XLA's threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def environment_defaults(values: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables unless they are set already."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def chosen_threads(environment: Mapping[str, str]) -> int | None:
    """The number of threads that ``NPROC`` lets XLA have; ``None`` if it is unset, or no number, which XLA ignores."""
    try:
        return max(1, int(environment.get("NPROC", "")))
    except ValueError:
        return None
