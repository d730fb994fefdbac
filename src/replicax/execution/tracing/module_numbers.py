"""Numbers of modules: which Python numbers among the arguments are part of a module's structure.

A number that a user passes to a step changes from call to call, so it is traced. A number in a module of Equinox is a
setting, such as the rate of a dropout, that the module's Python reads: ``equinox.filter_jit`` does not trace it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

_NONE: frozenset[int] = frozenset()


def module_numbers(tree: Any) -> frozenset[int]:
    """The positions of the leaves that are in a module of Equinox, if the user has loaded that."""
    equinox = sys.modules.get("equinox")
    return _NONE if equinox is None else _inside(tree, equinox.Module)


@functools.lru_cache(maxsize=256)
def _inside(tree: Any, module: type) -> frozenset[int]:
    positions: set[int] = set()
    first = 0
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        data = node.node_data()
        if data is not None and not issubclass(data[0], module):
            nodes += reversed(node.children())
            continue
        if data is not None:
            positions.update(range(first, first + node.num_leaves))
        first += node.num_leaves
    return frozenset(positions)
