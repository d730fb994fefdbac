"""Keras, found when it is loaded: its models belong to the strategy in whose scope they are made.

Replicax loads no library that the program has not loaded. If Keras is loaded in a scope, or after one was entered,
Replicax is told by Python's import system, and adapts Keras before the program sees it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_KERAS = "keras"


def watch() -> None:
    """Adapt Keras now, or when it is loaded."""
    if _KERAS in sys.modules:
        _adapt()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _adapt() -> None:
    if "keras.src.trainers.trainer" in sys.modules:  # it is Keras 3, and has been loaded to the end
        importlib.import_module("replicax.models.keras.scoped_models").install()


class _Watch(importlib.abc.MetaPathFinder):
    """Finds nothing by itself; sees to it that what others find is adapted when it has been loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See :class:`importlib.abc.MetaPathFinder`."""
        if fullname != _KERAS:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        loader = None if spec is None else spec.loader
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:  # until now: who only asks whether Keras is installed finds it, too
                sys.meta_path.remove(self)
            _adapt()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
