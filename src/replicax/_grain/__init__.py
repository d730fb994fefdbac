"""The only package that uses Grain's private names.

:mod:`~replicax._grain.graph` analyses the nodes of datasets, :mod:`~replicax._grain.nodes` has our own nodes, and
:mod:`~replicax._grain.installed` says what the installed version lacks. Grain loads slowly, so this file does not
import it, and others import those three only when a dataset is created. `tests/data/test_grain_fence.py` looks for each
private name in the installed Grain, and for uses outside this package.
"""

from __future__ import annotations

from typing import Any


class BatchedSource:
    """A random-access source that reads several examples at once, with its method ``read_several(indices)``."""

    read_several: Any
    _getitems: Any

    def __init_subclass__(cls) -> None:
        # Only in the class that defines it: a subclass with its own __getitem__ is read one by one.
        if "read_several" in vars(cls):
            cls._getitems = cls.read_several
