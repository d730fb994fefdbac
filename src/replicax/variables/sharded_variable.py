"""``ShardedVariable``: one variable, split over the replicas."""

from __future__ import annotations

from typing import Any

from replicax import context
from replicax.variables.partitioners import Partitioner, over_all
from replicax.variables.variable import Variable


class ShardedVariable(Variable):
    """A variable split over the replicas: each has a piece.

    A step uses it like any other variable, with the same value on all replicas. Each operation that needs the whole
    value gathers it, and frees it afterwards. Elementwise operations run on the pieces. Its
    gradient is reduce-scattered, and an optimizer keeps its slots in the same pieces. Under
    :class:`replicax.ShardedStrategy` all variables of at least 1 KiB are split like this.

    Args:
      initial_value: as for :class:`Variable`; from a callable each device computes its own piece.
      partitioner: the number of pieces, and the dim: a :class:`FixedShardsPartitioner`,
        :class:`MinSizePartitioner`, :class:`MaxSizePartitioner` or a function from shape and dtype to a number for
        each dim, of which one may be above 1. There is at most one piece for each replica; pieces may differ in size.
        By default each replica has a piece, along the largest dim that divides evenly, or else along the largest dim;
        also if the strategy splits others within groups.
      options: the further options of :class:`Variable`.

    Raises:
      ValueError: as :class:`Variable`; also if it is on-read, as then each replica has its own value; or if the
        partitioner has a wrong result.

    Mirrored. Reading issues one all-gather if the whole value is needed; see also :meth:`Variable.assign`.

    >>> import replicax, jax.numpy as jnp
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     v = replicax.variables.ShardedVariable(jnp.arange(5.0), name="v")
    >>> v
    <ShardedVariable 'v' float32[5] split along dim 0 over 2 replicas: [0. 1. 2. 3. 4.]>
    >>> [piece.tolist() for piece in strategy.local_results(v)]
    [[0.0, 1.0, 2.0], [3.0, 4.0]]
    """

    def __init__(self, initial_value: Any, *, partitioner: Partitioner | None = None, **options: Any) -> None:
        replicas = context.current_replicas().device_count
        super().__init__(initial_value, partitioner=partitioner or over_all(replicas, min_bytes=0), **options)
