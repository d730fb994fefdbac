"""The communicator of a compiled step: collectives over the mesh's replica axis, traced once for all replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax import lax

from replicax import context, reduction
from replicax.reduction import ReduceOp
from replicax.topology.mesh import REPLICA_AXIS
from replicax.values import Local, PerReplica, is_leaf

if TYPE_CHECKING:
    from replicax.strategy import Strategy


class SpmdCommunicator:
    """See :class:`replicax.context.Communicator`. Everything here only records operations."""

    def replica_id(self) -> Any:
        return lax.axis_index(REPLICA_AXIS)

    def all_reduce(self, op: ReduceOp, arrays: Sequence[Any]) -> list[Any]:
        return reduction.all_reduce(op, arrays)

    def all_gather(self, array: Any, axis: int) -> Any:
        return reduction.all_gather(array, axis)

    def from_first(self, array: Any) -> Any:
        return reduction.from_first(array)

    def merge(self, strategy: Strategy, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if strategy.num_replicas_in_sync > 1:
            args, kwargs = jax.tree_util.tree_map(_across, (args, kwargs), is_leaf=is_leaf)
        with context.cross_replica(strategy):
            result = fn(strategy, *args, **kwargs)
        return jax.tree_util.tree_map(_back, result, is_leaf=is_leaf)


def _across(leaf: Any) -> Any:
    return PerReplica(Local(leaf)) if isinstance(leaf, jax.core.Tracer) else leaf


def _back(leaf: Any) -> Any:
    if isinstance(leaf, PerReplica) and isinstance(leaf.form, Local):
        return leaf.form.value
    return leaf
