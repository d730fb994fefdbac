"""Endless input: one pass over a dataset after the other, for as many steps as a run has."""

from __future__ import annotations

import math
from typing import Any

import jax

from replicax.data import DistributedDataset, DistributedIterator
from replicax.data.dataset import reader_of
from replicax.execution.many_steps.element_groups import ElementGroup, Single
from replicax.execution.many_steps.loop import Taken
from replicax.loop.stop_requests import StopRequests
from replicax.loop.wall_time import WallTime
from replicax.pytrees import is_leaf, registered
from replicax.values import PerReplica, Ragged
from replicax.workers.replicas import Replicas


class EndlessInput:
    """The elements for a run, from a distributed dataset, or from an iterator of one, which goes on from where it is.

    ``wall`` is told how long the run waits for elements. ``requests`` may end the run meanwhile, and before a step gets
    its elements. ``is_saved`` says whether the place in the input is to be part of checkpoints.

    Raises:
      ValueError: another strategy's dataset; or the place in it can't be saved, and has to be.
    """

    def __init__(
        self,
        dataset: DistributedDataset | DistributedIterator,
        replicas: Replicas,
        wall: WallTime,
        requests: StopRequests,
        is_saved: bool,
    ) -> None:
        self._is_own = isinstance(dataset, DistributedDataset)
        self.iterator: DistributedIterator = iter(dataset) if isinstance(dataset, DistributedDataset) else dataset
        self._wall, self._requests = wall, requests
        self._replicas = replicas
        reader_of(self.iterator, replicas)  # raises unless the dataset is for these replicas
        if is_saved:
            self.iterator.get_state()  # raises before anything is trained if it can't be saved
        self.examples = 0  # that all replicas have had
        # Of the first element that has the same shapes on all replicas: the arguments of a step on it, and its size.
        self.arguments: Any = None
        self.bytes_per_step = 0

    def take(self, steps: int, grouped: bool) -> Taken:
        """The next elements; those of the next pass where one is over. Fewer than ``steps`` at the end of a pass.

        Raises RunStops if the run ends before this call; the elements then come next again.
        """
        before, on_wait = self._wall.switch("input"), self._requests.check_wait
        try:
            taken = reader_of(self.iterator, self._replicas).take(steps, grouped, on_wait)
        except StopIteration:
            self._requests.begin_call()  # all workers begin the next pass, or none: they save one place
            self.iterator._begin_again()
            taken = reader_of(self.iterator, self._replicas).take(steps, grouped, on_wait)
        finally:
            self._wall.switch(before)
        try:
            self._requests.begin_call()
        except BaseException:
            taken.give_back(sum(group.count for group in taken.groups))
            raise
        self.examples += sum(map(examples_in, taken.groups))
        first = taken.groups[0]
        if not self.bytes_per_step and isinstance(first, ElementGroup):
            self.bytes_per_step = sum(array.nbytes for array in first.arrays) // first.count
            self.arguments = first.arguments
        return taken

    def close(self) -> None:
        """End the pass; not one that the caller has begun."""
        if self._is_own:
            self.iterator.close()


def examples_in(group: ElementGroup | Single) -> int:
    """Count the examples of all replicas together, by the first array of an element."""
    if isinstance(group, ElementGroup):
        if group.sizes is not None:
            return sum(map(sum, group.sizes))
        return math.prod(group.arrays[0].shape[: 2 if group.bare else 3])
    first: Any = jax.tree_util.tree_leaves(registered(group.element), is_leaf=is_leaf)[0]
    if not isinstance(first, PerReplica):
        return math.prod(first.shape[:1])
    form: Any = first.form
    if isinstance(form, Ragged):
        return sum(shape[0] for shape in form.shapes)
    return math.prod(form.array.shape[:2]) if first.mask is None else int(first.mask.host.sum())
