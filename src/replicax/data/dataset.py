"""Distributed datasets: each global batch is divided over the replicas, and laid on their devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax import context
from replicax.data.sources import as_reiterable
from replicax.errors import ContextError
from replicax.execution.placing import ARRAYS
from replicax.nests import known
from replicax.topology.mesh import REPLICA_AXIS
from replicax.values import PerReplica, Stacked


class DistributedDataset:
    """A re-iterable of pytrees with ``PerReplica`` leaves; see ``Strategy.distribute_dataset``.

    >>> import replicax, numpy as np
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> dataset = strategy.distribute_dataset([np.zeros((4, 3))])
    >>> next(iter(dataset))
    PerReplica(float32[2,3], 2 replicas)
    """

    def __init__(self, dataset: Any, mesh: Mesh) -> None:
        self._source = as_reiterable(dataset)
        self._mesh = mesh

    def __iter__(self) -> DistributedIterator:
        """Start anew."""
        return DistributedIterator(iter(self._source), self._mesh)


class DistributedIterator(Iterator[Any]):
    """One pass over a :class:`DistributedDataset`.

    >>> import replicax, numpy as np
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> iterator = iter(strategy.distribute_dataset([np.zeros(4), np.zeros(6)]))
    >>> next(iterator), iterator.get_next()
    (PerReplica(float32[2], 2 replicas), PerReplica(float32[3], 2 replicas))
    """

    def __init__(self, source: Iterator[Any], mesh: Mesh) -> None:
        self._source = source
        self._mesh = mesh
        self._position = 0

    def __next__(self) -> Any:
        """The next element.

        Raises:
          StopIteration: there is none.
          ContextError: called inside a step.
          ValueError: an array has no dim 0, or it does not divide by the number of replicas.
        """
        if context.in_step():
            raise ContextError(
                "next(iterator) was called inside a step, where it would run once, while tracing: take the element "
                "outside and pass it to strategy.run(step, args=(element,))"
            )
        batch = next(self._source)
        element = split_batch(batch, self._mesh, f"element {self._position}")
        self._position += 1
        return element

    get_next = __next__


def split_batch(batch: Any, mesh: Mesh, where: str) -> Any:
    """Divide dim 0 of every array of ``batch`` over the replicas of ``mesh``, in order.

    Args:
      batch: a pytree of arrays ``[global_batch, …]``.
      mesh: the replicas' devices.
      where: what to call the batch in an error message.

    Returns:
      The pytree with ``PerReplica`` leaves of shape ``[global_batch / n, …]``; with one replica, bare arrays.

    Raises:
      ValueError: an array is a scalar, sizes of dim 0 differ, or do not divide by the number of replicas.
      TypeError: a leaf is no array.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(known(batch))
    n = mesh.shape[REPLICA_AXIS]
    arrays = []
    sizes = {}
    for path, leaf in paths:
        name = where + jax.tree_util.keystr(path)
        if not isinstance(leaf, ARRAYS):
            raise TypeError(f"{name} is {type(leaf).__name__} {leaf!r}; a batch is a pytree of arrays")
        # A copy: the dataset may fill the same buffer again while this batch is still on its way to the devices.
        array = leaf if isinstance(leaf, jax.Array) else np.array(leaf)
        if array.ndim == 0:
            raise ValueError(
                f"{name} is a scalar and can't be divided over {n} replica(s): batch the dataset by the global "
                "batch first"
            )
        sizes[name] = array.shape[0]
        arrays.append(array)
    if len(set(sizes.values())) > 1:
        raise ValueError(f"all arrays of a batch must have the same dim 0, got {sizes}")
    size = next(iter(sizes.values()), 0)
    if size % n:
        raise ValueError(
            f"{where}: a batch of {size} does not divide over {n} replicas ({size} = {n} × {size // n} + {size % n}). "
            f"Batch by a multiple of {n}, and drop or pad the last batch (drop_remainder=True)."
        )
    if n == 1:
        sharding = NamedSharding(mesh, PartitionSpec())
        return jax.tree_util.tree_unflatten(tree, jax.device_put(arrays, sharding))
    sharding = NamedSharding(mesh, PartitionSpec(REPLICA_AXIS))
    stacked = jax.device_put([a.reshape(n, size // n, *a.shape[1:]) for a in arrays], sharding)
    return jax.tree_util.tree_unflatten(tree, [PerReplica(Stacked(a)) for a in stacked])
