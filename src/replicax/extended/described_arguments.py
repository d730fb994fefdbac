"""Steps traced for arguments that are only described, before their data exist."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from replicax.execution.cache import ProgramCache
from replicax.execution.compiled.replicate import Executable
from replicax.execution.replica_values import example_mask
from replicax.execution.run import check_call, prepare
from replicax.execution.tracing.arguments import Arguments
from replicax.execution.tracing.stateful_arguments import stateful_call
from replicax.pytrees import is_leaf, registered
from replicax.values import PerReplica, Stacked, padded
from replicax.workers.replicas import Replicas


class PaddedShapeDtypeStruct(jax.ShapeDtypeStruct):
    """One replica's shape and dtype of an array of which some rows, along dim 0, may be padding."""


def traced_step(
    programs: ProgramCache, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, method: str
) -> tuple[Executable, Arguments]:
    """The program of a step, kept with the strategy's others, and its arguments, some of which may be described."""
    check_call(programs.replicas, fn, args, kwargs, method)
    call = stateful_call(programs.replicas, fn, args, kwargs)
    if call is not None:
        fn, args, kwargs = call
    arguments = Arguments(*_abstract_arrays((tuple(args), dict(kwargs or {})), programs.replicas))
    return prepare(programs, fn, arguments), arguments


def _abstract_arrays(tree: Any, replicas: Replicas) -> Any:
    """``tree`` with described arguments in place of each ``jax.ShapeDtypeStruct``, which has one replica's shape.

    They are like those of an element: ``PerReplica`` values, padded or not, or with one replica bare arrays.
    """
    count = replicas.num_replicas

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        array: Any = jax.ShapeDtypeStruct((count, *leaf.shape), dtype)
        if isinstance(leaf, PaddedShapeDtypeStruct):
            rows = leaf.shape[0]
            return padded(array, example_mask((rows,) * count, rows, replicas.mesh))
        return jax.ShapeDtypeStruct(leaf.shape, dtype) if count == 1 else PerReplica(Stacked(array))

    return jax.tree_util.tree_map(one, registered(tree), is_leaf=is_leaf)
