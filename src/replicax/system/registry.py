"""The registry: parts of upper packages that lower ones use; registered at the import of Replicax, loaded when needed.

Imports point downward, but the context has to find the default strategy, a step the adapter of other libraries'
objects, a scope the code that makes Keras' models the strategy's, and a new step its checks and the passes that only
some steps need. These are in upper packages, and the package itself (``replicax/__init__.py``) registers them here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

default_strategy: Callable[[], Callable[[], Any]]
"""Loads the function that makes the strategy of code outside every scope."""

strategy_class: Callable[[], type]
"""Loads the class of all strategies."""

step_checks: list[Callable[[], Callable[..., Any]]] = []
"""Each loads a check of the steps of several replicas, which may warn, and returns the programs that it is given."""

replicate_placed: Callable[[], Callable[[Any, Any], Any]]
"""Loads the function that makes an executable of a program that assigns values to logical devices, and a mesh."""

capture_ragged: Callable[[], Callable[..., Any]]
"""Loads the function that captures a step whose arguments differ in size between replicas."""

check_ragged_text: Callable[[], Callable[[str], None]]
"""Loads the function that checks the compiled text of such a step."""

backends: Callable[[], Mapping[str, Any]] = dict
"""Loads what the compilers of single platforms need, by platform."""

examples_in_results: Callable[[], Callable[..., Any]]
"""Loads the function that finds the examples in the results of a step that gets padded arguments."""

padding_question: Callable[[], Callable[..., Any]]
"""Loads the class of questions whether examples lie along a dim."""

evaluate_on_device: Callable[[], Callable[..., list[Any]]]
"""Loads the function that evaluates a program for all replicas of a device, or with sums in a fixed order."""

run_per_replica: Callable[[], Callable[..., Any]]
"""Loads the function that runs a step as plain Python, and warns if that is as it can't be one compiled program."""

object_adapter: Callable[[], Any]
"""Loads the adapter of the objects of Flax NNX, whose arrays a step reads and writes in place."""

scoped_libraries: dict[str, Callable[[], None]] = {}
"""By library: makes models that are created in a scope belong to its strategy. Each is called once."""


def adapt_scoped_libraries() -> list[str]:
    """Adapt each of :data:`scoped_libraries` that the program has imported since the last call; returns their names.

    It does not import a library that the program has not imported.

    >>> adapt_scoped_libraries()
    []
    """
    adapted = []
    for library in list(scoped_libraries):
        # Python sets this while it imports a module, whose classes can't be adapted yet.
        spec = getattr(sys.modules.get(library), "__spec__", None)
        if spec is not None and not getattr(spec, "_initializing", False):
            adapt = scoped_libraries.pop(library, None)
            if adapt is not None:  # no other thread has adapted it
                adapt()
                adapted.append(library)
    return adapted
