"""Datasets that feed the towers: one whole element for each."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from replicax.data import DistributedIterator
from replicax.errors import ContextError
from replicax.nests import known
from replicax.strategy import Strategy


class PerDeviceDataset:
    """A dataset for all towers; get it from ``distribute_dataset``. Here it is :class:`replicax.DistributedDataset`.

    Each tower gets a whole element: that of ``strategy.distribute_datasets_from_function``. A last round in which there
    are fewer elements than towers is left out.

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
        self._strategy = strategy
        self._rounds = _Rounds(strategy, dataset_fn)
        self._dataset = strategy.distribute_datasets_from_function(lambda _: self._rounds)

    def make_one_shot_iterator(self) -> PerDeviceIterator:
        """One pass, which begins at once: ``iter`` of a ``replicax.DistributedDataset``."""
        iterator = self.make_initializable_iterator()
        iterator.initializer.run()
        return iterator

    def make_initializable_iterator(self, shared_name: str | None = None) -> PerDeviceIterator:
        """One that begins when its ``initializer`` is run, and anew; ``iter`` of ``replicax.DistributedDataset``."""
        return PerDeviceIterator(self._strategy, self._rounds, lambda: iter(self._dataset))

    def __iter__(self) -> PerDeviceIterator:
        """One pass."""
        return self.make_one_shot_iterator()


class Operation:
    """What a session would run: call it, or its ``run``. Replicax has none, as things happen when they are called."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def run(self, feed_dict: Any = None, session: Any = None) -> None:
        """Do it: in Replicax it would have been done."""
        self._action()

    def __call__(self) -> None:
        self.run()


class PerDeviceIterator:
    """One pass over a :class:`PerDeviceDataset`; here it is :class:`replicax.DistributedIterator`."""

    def __init__(self, strategy: Strategy, rounds: _Rounds, begin: Callable[[], DistributedIterator]) -> None:
        self._strategy = strategy
        self._rounds = rounds
        self._begin = begin
        self._iterator: DistributedIterator | None = None

    @property
    def initializer(self) -> Operation:
        """Begins a pass when it is run, as ``iter`` of a ``replicax.DistributedDataset`` does."""
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
        """The next element of each tower (T), or a ``StopIteration``; ``replicax.DistributedIterator.get_next``."""
        element = next(self.iterator)
        return self._strategy.run(_unpacked, (element,)) if self._rounds.packed else element

    __next__ = get_next

    def __iter__(self) -> PerDeviceIterator:
        return self

    def of_tower(self, element: Any) -> Any:
        """One tower's element, as it is in the dataset, from what a ``replicax.DistributedIterator`` gives a step."""
        return _unpacked(element) if self._rounds.packed else element


class _Rounds:
    """The elements of a dataset in rounds, of one for each tower of this worker.

    Replicas are fed batches: arrays that all have the same number of rows. Elements that are no such batches are
    packed: each of their arrays becomes the only row of another.

    Attributes:
      packed: whether they are; known when the first element has been read.
    """

    def __init__(self, strategy: Strategy, dataset_fn: Any) -> None:
        self._towers = len(strategy.extended.local_replicas)
        self._make = _maker(strategy, dataset_fn)
        self.packed: bool | None = None

    def __iter__(self) -> Iterator[Any]:
        elements = iter(self._make())
        while len(this := list(itertools.islice(elements, self._towers))) == self._towers:
            yield from map(self._with_rows, this)

    def _with_rows(self, element: Any) -> Any:
        leaves, tree = jax.tree_util.tree_flatten(known(element))
        arrays = [np.asarray(leaf) for leaf in leaves]
        if self.packed is None:
            self.packed = len({a.shape[:1] for a in arrays}) > 1 or any(not a.ndim for a in arrays)
        return jax.tree_util.tree_unflatten(tree, [a[None] for a in arrays] if self.packed else arrays)


def _unpacked(element: Any) -> Any:
    return jax.tree_util.tree_map(lambda x: x[0], known(element))


def _maker(strategy: Strategy, dataset_fn: Any) -> Callable[[], Iterable[Any]]:
    """A function that gives the dataset, for each pass, from a dataset or a function that makes one.

    Raises:
      ValueError: it is neither.
    """
    is_function = callable(dataset_fn) and not isinstance(dataset_fn, Iterable) and not inspect.isclass(dataset_fn)
    if not is_function and isinstance(dataset_fn, Iterator):
        raise ValueError(
            f"distribute_dataset: expected a dataset or a function that makes one, got the iterator {dataset_fn!r}, "
            "which can be gone through only once"
        )
    dataset = dataset_fn() if is_function else dataset_fn
    if isinstance(dataset, Iterator):  # made anew for each pass
        return itertools.chain([dataset], iter(dataset_fn, None)).__next__
    leaves = jax.tree_util.tree_leaves(known(dataset)) if not isinstance(dataset, list) else []
    if leaves and all(isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves):
        dataset = strategy.make_numpy_dataset(dataset)
    is_dataset = isinstance(dataset, Iterable) or hasattr(dataset, "__getitem__")
    if isinstance(dataset, str | bytes | dict) or not is_dataset:
        wanted = (
            "dataset_fn() must return a dataset"
            if is_function
            else "expected a dataset, or a function without arguments that makes one"
        )
        raise ValueError(f"distribute_dataset: {wanted}, got {dataset!r}")
    return lambda: dataset
