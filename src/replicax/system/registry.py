"""What lower rooms use of upper ones: registered when Replicax is imported, loaded when it is needed.

Imports point downward, but the context has to find the default strategy, a step the adapters of other libraries'
objects, a scope what makes Keras' models the strategy's, and a new step its checks. These live in upper rooms, which
the package itself (``replicax/__init__.py``) registers here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

default_strategy: Callable[[], tuple[Callable[[], Any], type]]
"""Loads what makes the strategy of code outside every scope, and the class of all strategies."""

step_checks: list[Callable[[], Callable[..., Any]]] = []
"""Each loads a check of the steps of several replicas, which may warn, and returns the program that it is given."""

placed_steps: Callable[[], Callable[[Any, Any], Any]]
"""Loads what makes an executable of a program that assigns values to logical devices, and a mesh."""

ragged_steps: Callable[[], tuple[Callable[..., Any], Callable[[str], None]]]
"""Loads what captures a step whose arguments differ in size between replicas, and what checks its compiled text."""

per_replica_executor: Callable[[], tuple[Callable[..., Any], Callable[..., Any]]]
"""Loads what runs a step as plain Python, and what does so for a step that can't be one compiled program."""

object_adapters: dict[str, Callable[[], Any]] = {}
"""By library: loads the adapter of the objects whose arrays a step reads and writes in place."""

scoped_libraries: dict[str, Callable[[], None]] = {}
"""By library: makes its models belong to the strategy in whose scope they are made. Each is called once."""


def adapt_scoped_libraries() -> list[str]:
    """Adapt those of :data:`scoped_libraries` that the program has imported since the last call; returns their names.

    Replicax loads no library that the program has not loaded.

    >>> adapt_scoped_libraries()
    []
    """
    adapted = []
    for library in list(scoped_libraries):
        # Python sets it while a module is being imported, whose classes can't be adapted yet.
        spec = getattr(sys.modules.get(library), "__spec__", None)
        if spec is not None and not getattr(spec, "_initializing", False):
            adapt = scoped_libraries.pop(library, None)
            if adapt is not None:  # another thread has not been quicker
                adapt()
                adapted.append(library)
    return adapted
