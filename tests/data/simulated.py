"""Datasets of several workers that are threads, whose elements stay on the host."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import Any

import numpy as np

from replicax import InputOptions
from replicax.data.dataset import DistributedDataset
from replicax.data.workers import InputWorkers
from replicax.workers.exchange import Alone
from replicax.workers.lockstep import Lockstep
from tests.simulated_workers import SimulatedWorkers, run

_numbers = itertools.count()


@dataclasses.dataclass
class Chunk:
    """What a worker's replicas got in one step."""

    sizes: tuple[int, ...]
    mine: range
    parts: list[Any]
    """Of each replica the numbers of its examples."""
    mask: list[int] | None


def input_workers(workers: int, replicas: int | tuple[int, ...], timeout: float = 20.0) -> list[InputWorkers]:
    """Of ``workers``, each with ``replicas`` replicas, or with so many; ``timeout`` in seconds."""
    everyone: Any = SimulatedWorkers.of(workers) if workers > 1 else [Alone()]
    counts = (replicas,) * workers if isinstance(replicas, int) else replicas
    ranges = tuple(range(sum(counts[:w]), sum(counts[: w + 1])) for w in range(workers))
    name = f"test {next(_numbers)}"
    return [InputWorkers(Lockstep(worker, name, timeout=timeout), ranges, lambda: _taken, name) for worker in everyone]


def _taken(element: Any) -> Any:
    return element


def examples(element: Any) -> list[int]:
    """The numbers of the examples of this worker's replicas, without what only fills up."""
    if element.filled is None:
        return [int(x) for part in element.parts for x in _ids(part.leaves[0])]
    sizes = [part.size for part in element.parts]
    return [int(x) for rows, size in zip(element.filled[0], sizes, strict=True) for x in _ids(rows[:size])]


def _ids(leaf: Any) -> Any:
    return np.asarray(leaf).ravel()


class Run:
    """A dataset on several workers.

    Args:
      make: the dataset of a worker, from its ``InputContext``; ``dataset_fn`` if it is per replica.
      workers, replicas: how many there are, and how many replicas each has.
      options: the input options.
      from_function: whether ``make`` goes to ``distribute_datasets_from_function``.
      timeout: how many seconds workers wait for each other.
    """

    def __init__(self, make, workers=1, replicas=1, options=None, from_function=False, timeout=20.0) -> None:
        self.everyone = input_workers(workers, replicas, timeout)
        options = options or InputOptions()

        def dataset(mine):
            own = options[mine.index] if isinstance(options, list) else options
            if from_function:
                return DistributedDataset(None, own, mine, "test", make)
            return DistributedDataset(make(mine.context), own, mine, "test")

        self.datasets = self.each(lambda mine, i: dataset(mine))
        self.iterators = self.each(lambda mine, i: iter(self.datasets[i]))

    def each(self, fn):
        """``fn(its InputWorkers, index)`` on every worker, at the same time."""
        if len(self.everyone) == 1:
            return [fn(self.everyone[0], 0)]
        workers = [mine.lockstep.workers for mine in self.everyone]
        return run(workers, lambda worker: fn(self.everyone[worker.index], worker.index))

    def steps(self, count=None):
        """The elements of the next steps: for each a list with one element a worker."""

        def take(mine, i):
            return list(itertools.islice(self.iterators[i], count))

        columns = self.each(take)
        assert len({len(column) for column in columns}) == 1, "workers take different numbers of steps"
        steps = list(zip(*columns, strict=True))
        for step in steps:
            check(step)
        return steps

    def seen(self, count=None) -> collections.Counter[int]:
        return collections.Counter(x for step in self.steps(count) for element in step for x in examples(element))

    def state(self):
        states = self.each(lambda mine, i: self.iterators[i].get_state())
        assert all(state == states[0] for state in states)
        return states[0]

    def restore(self, state) -> None:
        self.each(lambda mine, i: self.iterators[i].set_state(state))

    def close(self) -> None:
        for iterator in self.iterators:
            iterator.close()


def check(step) -> None:
    """What all workers have must fit together."""
    sizes = step[0].sizes
    assert all(element.sizes == sizes and element.alike == step[0].alike for element in step)
    assert sum((tuple(part.size for part in element.parts) for element in step), ()) == sizes
    assert step[0].alike == (step[0].filled is not None or len(set(sizes)) == 1)
    for element in step:
        if element.filled is not None:
            assert len({stack.shape[1] for stack in element.filled}) == 1


def steps_of(run):
    """What each replica got in each step."""
    return [[_row_ids(part) for element in step for part in element.parts] for step in run.steps()]


def _row_ids(part):
    return tuple(np.asarray(part.leaves[0]).tolist())
