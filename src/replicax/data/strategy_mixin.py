"""``InputMixin``: the methods of a strategy that feed its replicas."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from replicax import _jax, context
from replicax.data.dataset import DistributedDataset
from replicax.data.options import InputOptions, checked_input_options
from replicax.data.value_context import ValueContext, values_from_function
from replicax.data.workers import InputContext, workers_of
from replicax.extended import StrategyExtended
from replicax.user_functions import checked_function
from replicax.workers.replicas import Replicas


class InputMixin:
    """The input methods of :class:`replicax.Strategy`."""

    extended: StrategyExtended

    @_jax.hiding_frames
    def distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> DistributedDataset:
        """Feed the replicas from ``dataset``, whose elements are *global* batches.

        Args:
          dataset: one of Grain, tf.data, PyTorch or Hugging Face; any re-iterable, or generator function, of pytrees of
            NumPy arrays; or one such pytree, whose slices along dim 0 are the batches. Dim 0 of every array of a batch
            is divided over the replicas in order: 5 over 4 replicas as 2, 2, 1, 0.
          options: what each worker reads, what to do with a last batch that is not full, and how far to read ahead;
            see :class:`InputOptions`.

        Returns:
          A re-iterable of pytrees with ``PerReplica`` leaves (bare arrays with one replica). Each iteration
          starts from the beginning.

        Raises:
          TypeError: ``dataset`` is an iterator, which allows only one pass, distributed already, or not iterable.
          ValueError: an empty dataset; sharding by file with fewer files than workers; while iterating: a batch that
            has no dim to split.
          ContextError: called inside a replica.

        No collective; workers that read their own files agree on each element through the coordination service.

        >>> import replicax, numpy as np
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> batches = [{"x": np.arange(4.0)}, {"x": np.arange(4.0, 8.0)}]
        >>> for batch in strategy.distribute_dataset(batches):
        ...     print(strategy.reduce("sum", batch["x"], axis=0))
        6.0
        22.0
        """
        method = "strategy.distribute_dataset"
        options = checked_input_options(options, method)
        return DistributedDataset(dataset, options, workers_of(self._checked_replicas(method)), method)

    @_jax.hiding_frames
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Feed the replicas from datasets that each worker makes, of *per-replica* batches.

        Args:
          dataset_fn: called once on each worker with an :class:`InputContext`, which says which worker it is for. It
            returns a dataset as in :meth:`distribute_dataset`, each element of which goes to one replica, whole. So
            batch by ``context.get_per_replica_batch_size(global_batch_size)``, and give each worker its own
            examples: ``context.input_pipeline_id`` of ``context.num_input_pipelines``.
          options: as in :meth:`distribute_dataset`; ``auto_shard_policy`` has no effect.

        Returns:
          A re-iterable of pytrees with ``PerReplica`` leaves (bare arrays with one replica). Replicas without a batch
          get arrays of size 0.

        Raises:
          TypeError, ValueError, ContextError: as in :meth:`distribute_dataset`.

        >>> import replicax, numpy as np
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> def batches(context):
        ...     size = context.get_per_replica_batch_size(4)
        ...     return [np.full(size, float(i)) for i in range(4)]
        >>> for x in strategy.distribute_datasets_from_function(batches):
        ...     print(strategy.gather(x, axis=0))
        [0. 0. 1. 1.]
        [2. 2. 3. 3.]
        """
        method = "strategy.distribute_datasets_from_function"
        options = checked_input_options(options, method)
        replicas = self._checked_replicas(method)
        if not callable(dataset_fn):
            raise TypeError(f"{method}: dataset_fn must be a function of an InputContext, got {dataset_fn!r}")
        if inspect.iscoroutinefunction(dataset_fn) or inspect.isasyncgenfunction(dataset_fn):
            raise TypeError(
                f"{method}: dataset_fn is an async function, which gives no dataset: write it with def alone"
            )
        return DistributedDataset(None, options, workers_of(replicas), method, dataset_fn)

    @_jax.public_call
    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Make a ``PerReplica`` value by calling ``value_fn`` once for each of this worker's replicas.

        Args:
          value_fn: gets a :class:`ValueContext` (``replica_id_in_sync_group``, ``num_replicas_in_sync``) and
            returns that replica's component: an array, a number, or a pytree of them.

        Returns:
          The pytree with ``PerReplica`` leaves, even for a single replica.

        Raises:
          TypeError: ``value_fn`` is not a function.
          ValueError: the replicas' pytrees differ in structure.
          ContextError: called inside a replica.

        >>> import replicax
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.distribute_values_from_function(lambda ctx: ctx.num_replicas_in_sync)
        PerReplica(int32[], 2 replicas: 2, 2)
        """
        replicas = self._checked_replicas("strategy.distribute_values_from_function")
        checked_function(value_fn, "strategy.distribute_values_from_function(value_fn)", "value_fn")
        return values_from_function(value_fn, replicas)

    def _checked_replicas(self, method: str) -> Replicas:
        """The replicas to feed, if this is outside of steps and their devices are there."""
        context.check_cross_replica(self.extended.replicas, method)
        context.check_present(self.extended.replicas, method)
        return self.extended.replicas

    @_jax.hiding_frames
    def make_numpy_dataset(self, numpy_input: Any) -> Any:
        """A Grain dataset of single examples: the slices of ``numpy_input`` along dim 0.

        The arrays stay where they are; reading an example copies it. Shuffle and batch the dataset with
        Grain, and pass it to :meth:`distribute_dataset`.

        Args:
          numpy_input: a pytree of NumPy arrays with the same dim 0. A list is not part of the pytree: it becomes one
            array, with a row for each of its entries.

        Returns:
          A ``grain.MapDataset`` of pytrees of the same structure.

        Raises:
          TypeError: random keys, or a masked array.
          ValueError: scalars, arrays that differ in dim 0, or a list whose entries differ in shape; the message names
            the leaf.

        >>> import replicax, numpy as np
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> examples = strategy.make_numpy_dataset({"x": np.arange(6.0)})
        >>> for batch in strategy.distribute_dataset(examples.batch(2)):
        ...     print(strategy.gather(batch["x"], axis=0))
        [0. 1.]
        [2. 3.]
        [4. 5.]
        """
        from replicax.data.reading.sources import numpy_examples  # loads Grain

        return numpy_examples(numpy_input)

    experimental_distribute_dataset = distribute_dataset
    experimental_distribute_datasets_from_function = distribute_datasets_from_function
    experimental_distribute_values_from_function = distribute_values_from_function
    experimental_make_numpy_dataset = make_numpy_dataset
