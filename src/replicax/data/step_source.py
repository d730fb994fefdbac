"""An iterator as ``run_steps`` reads it: several elements at once, of which some may come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replicax.data.dataset import DistributedDataset
from replicax.data.elements.chunks import Chunk, joined_where_alike
from replicax.data.iterator import DistributedIterator
from replicax.execution.many_steps.element_groups import ElementGroup, Single
from replicax.workers.replicas import Replicas


class IteratorSource:
    """The elements of an iterator, for ``run_steps``.

    Args:
      iterator: gives them.
    """

    def __init__(self, iterator: DistributedIterator) -> None:
        self._iterator = iterator
        self._chunks: list[Chunk] = []

    def take(self, steps: int, staged: bool) -> tuple[list[ElementGroup | Single], Exception | None]:
        """See :class:`replicax.execution.many_steps.loop.StepSource`."""
        chunks, error = self._iterator._given(lambda running: running.take(steps, staged))
        self._chunks = joined_where_alike(chunks)
        return [chunk.group for chunk in self._chunks], error

    def give_back(self, groups: Sequence[ElementGroup | Single]) -> None:
        """See :class:`replicax.execution.many_steps.loop.StepSource`."""
        left, back = sum(group.count for group in groups), []
        for chunk in reversed(self._chunks):
            if left <= 0:
                break
            if left < chunk.group.count:
                chunk = chunk.split(chunk.group.count - left)[1]
            left -= chunk.group.count
            back.append(chunk)
        self._iterator._running.give_back(back[::-1])


def source_of(iterator: Any, replicas: Replicas) -> IteratorSource:
    """The elements of ``iterator``, if it is for ``replicas``.

    Raises:
      TypeError: it is no iterator of a distributed dataset.
      ValueError: its dataset was distributed by another strategy; or it has been closed.
    """
    if not isinstance(iterator, DistributedIterator):
        hint = "the dataset itself: pass iter(dataset)" if isinstance(iterator, DistributedDataset) else repr(iterator)
        raise TypeError(
            "strategy.run_steps(fn, iterator, steps): iterator must be one of a dataset of this strategy, "
            f"iter(strategy.distribute_dataset(…)), got {hint}"
        )
    if iterator._dataset._feed.owner is not replicas:
        raise ValueError(
            "strategy.run_steps(fn, iterator, steps): the iterator's dataset was distributed by another strategy, "
            "whose replicas have the elements: distribute the dataset with this one"
        )
    iterator._check_open()
    return IteratorSource(iterator)
