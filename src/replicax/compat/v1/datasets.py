"""Datasets that feed the towers with one whole element each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from replicax.data import DistributedDataset, DistributedIterator, InputOptions
from replicax.data.workers import workers_of
from replicax.errors import ContextError
from replicax.pytrees import registered
from replicax.strategy import Strategy
from replicax.user_functions import function_name


class PerDeviceDataset:
    """A dataset for all towers, from ``distribute_dataset``. Here it is :class:`replicax.DistributedDataset`.

    Each tower gets a whole element: arrays and numbers of any shape, which need no batch dim. If a last round has fewer
    elements than towers, it is left out. With several workers each has its own dataset.

    >>> import numpy as np
    >>> from replicax.compat import v1
    >>> distribution = v1.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with distribution.scope():
    ...     dataset = distribution.distribute_dataset(lambda: [np.full(2, float(i)) for i in range(5)])
    ...     iterator = dataset.make_one_shot_iterator()
    ...     [[int(x[0]) for x in distribution.unwrap(iterator.get_next())] for _ in range(2)]
    [[0, 1], [2, 3]]
    """

    def __init__(self, strategy: Strategy, dataset_fn: Any) -> None:
        dataset, options = _dataset(strategy, dataset_fn), InputOptions(partial_batch="drop")
        workers = workers_of(strategy.extended.replicas)
        self._dataset = DistributedDataset(
            None, options, workers, "distribute_dataset", lambda _: dataset, examples=True
        )

    def make_one_shot_iterator(self) -> PerDeviceIterator:
        """A pass that begins at once: ``iter`` of a ``replicax.DistributedDataset``."""
        iterator = self.make_initializable_iterator()
        iterator.initializer.run()
        return iterator

    def make_initializable_iterator(self, shared_name: str | None = None) -> PerDeviceIterator:
        """A pass that begins whenever its ``initializer`` is run; ``iter`` of ``replicax.DistributedDataset``."""
        return PerDeviceIterator(lambda: iter(self._dataset))

    def __iter__(self) -> PerDeviceIterator:
        """A pass."""
        return self.make_one_shot_iterator()


class Operation:
    """An operation for a session: its ``run`` begins a pass, as ``iter`` of a ``replicax.DistributedDataset`` does."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def run(self, feed_dict: Any = None, session: Any = None) -> None:
        """Begin a pass; with ``replicax.DistributedDataset`` it is ``iter``."""
        self._action()

    def __call__(self) -> None:
        self.run()


class PerDeviceIterator:
    """A pass over a :class:`PerDeviceDataset`; here it is :class:`replicax.DistributedIterator`."""

    def __init__(self, begin: Callable[[], DistributedIterator]) -> None:
        self._begin = begin
        self._iterator: DistributedIterator | None = None

    @property
    def initializer(self) -> Operation:
        """An operation that begins a pass, as ``iter`` of a ``replicax.DistributedDataset`` does."""
        return Operation(self._initialize)

    def _initialize(self) -> None:
        if self._iterator is not None:
            self._iterator.close()
        self._iterator = self._begin()

    @property
    def iterator(self) -> DistributedIterator:
        """The :class:`replicax.DistributedIterator` of the pass.

        Raises:
          ContextError: it has not been initialized.
        """
        if self._iterator is None:
            raise ContextError(
                "the iterator has not been initialized: run iterator.initializer before get_next, or make it with "
                "make_one_shot_iterator"
            )
        return self._iterator

    def get_next(self, name: str | None = None) -> Any:
        """The next element of each tower, or a ``StopIteration``; ``replicax.DistributedIterator.get_next``."""
        return next(self.iterator)

    __next__ = get_next

    def __iter__(self) -> PerDeviceIterator:
        return self


def _dataset(strategy: Strategy, dataset_fn: Any) -> Any:
    """The dataset, from a dataset or a function that makes one."""
    is_function = callable(dataset_fn) and not isinstance(dataset_fn, Iterable) and not inspect.isclass(dataset_fn)
    if not is_function and isinstance(dataset_fn, Iterator):
        raise ValueError(
            f"distribute_dataset: expected a dataset or a function that makes one, got the iterator {dataset_fn!r}, "
            "which can be gone through only once"
        )
    dataset = dataset_fn() if is_function else dataset_fn
    if isinstance(dataset, Iterator):
        return _generator_function(dataset_fn, dataset)
    leaves = jax.tree_util.tree_leaves(registered(dataset)) if not isinstance(dataset, list) else []
    if leaves and all(isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves):
        return strategy.make_numpy_dataset(dataset)
    is_dataset = isinstance(dataset, Iterable) or hasattr(dataset, "__getitem__")
    if isinstance(dataset, str | bytes | dict | type) or not is_dataset:
        expected = (
            "dataset_fn() must return a dataset"
            if is_function
            else "expected a dataset, or a function without arguments that makes one"
        )
        raise ValueError(f"distribute_dataset: {expected}, got {dataset!r}")
    return dataset


def _generator_function(dataset_fn: Callable[[], Iterator[Any]], made: Iterator[Any]) -> Callable[[], Iterator[Any]]:
    """``dataset_fn``, whose first pass is the one that it has ``made`` already."""
    first = [made]

    def batches() -> Iterator[Any]:
        return first.pop() if first else dataset_fn()

    batches.__qualname__ = function_name(dataset_fn)  # for messages
    return batches
