"""Checks that values are the same on all replicas."""

from __future__ import annotations

from typing import Any

import jax

from replicax.locality import T
from replicax.pytrees import is_leaf, registered
from replicax.values import PerReplica
from replicax.variables.store import current_store


def mirrored(tree: Any, method: str, what: str = "") -> Any:
    """Return the pytree, after checking that its leaves are the same on all replicas.

    ``what`` names the argument: ``"args"``, ``"kwargs"``; it is empty if there is only one value.
    """
    store = current_store()

    def one(path: Any, leaf: Any) -> Any:
        name = what + jax.tree_util.keystr(path) if what or path else "the value"
        if isinstance(leaf, PerReplica):
            raise TypeError(f"{method}: {name} is {leaf!r}, one value for each replica: reduce it first")
        if isinstance(leaf, jax.Array):
            problem = f"{method}: {name} differs between replicas: reduce it first"
            [marked] = store.expect([leaf], frozenset({T}), problem)
            return marked if isinstance(leaf, jax.core.Tracer) else leaf  # a constant stays one
        return leaf

    return jax.tree_util.tree_map_with_path(one, registered(tree), is_leaf=is_leaf)
