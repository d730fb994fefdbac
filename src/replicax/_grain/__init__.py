"""The only package that touches what Grain keeps to itself.

:mod:`~replicax._grain.graph` knows the nodes that datasets are made of, :mod:`~replicax._grain.nodes` has nodes of our
own. Grain takes a while to load, so this file leaves it alone, and whoever imports those two does so when a dataset is
made. `tests/data/test_grain_fence.py` looks for each private name in the installed Grain, and for those that are used
elsewhere; `pyproject.toml` bounds the version.
"""

from __future__ import annotations

from typing import Any


class BatchedSource:
    """A random-access source that reads several examples at once, with its method ``read_several(indices)``."""

    read_several: Any
    _getitems: Any

    def __init_subclass__(cls) -> None:
        # Only where it is defined: a subclass with a __getitem__ of its own is read one by one.
        if "read_several" in vars(cls):
            cls._getitems = cls.read_several
