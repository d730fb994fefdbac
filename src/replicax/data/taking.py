"""Taking elements from an iterator, several at once, and giving them back."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from replicax.execution.groups import Group, Single, joined

if TYPE_CHECKING:
    from replicax.data.iterator import DistributedIterator
    from replicax.extended import StrategyExtended


@dataclasses.dataclass(frozen=True)
class Taken:
    """Some elements, with the states of the pass before, between and after them.

    Attributes:
      group: the elements.
      states: pickled, one more than there are elements.
    """

    group: Group | Single
    states: list[bytes]

    def split(self, count: int) -> tuple[Taken, Taken]:
        """The first ``count`` elements, and the others."""
        assert isinstance(self.group, Group)
        first, rest = self.group.split(count)
        return Taken(first, self.states[: count + 1]), Taken(rest, self.states[count:])


def joined_where_alike(takens: Sequence[Taken]) -> list[Taken]:
    """The same elements in as few groups as possible."""
    if len(takens) == 1:
        return list(takens)
    result = []
    for _, group in itertools.groupby(enumerate(takens), lambda x: _kind(*x)):
        members = [taken for _, taken in group]
        if len(members) > 1:
            states = [members[0].states[0], *(state for taken in members for state in taken.states[1:])]
            members = [Taken(joined([t.group for t in members if isinstance(t.group, Group)]), states)]
        result += members
    return result


def _kind(number: int, taken: Taken) -> Any:
    return taken.group.kind if isinstance(taken.group, Group) else number


class IteratorSource:
    """The elements of an iterator, for ``run_steps``.

    Args:
      iterator: gives them.
    """

    def __init__(self, iterator: DistributedIterator) -> None:
        self._iterator = iterator
        self._takens: list[Taken] = []

    def take(self, steps: int, staged: bool) -> tuple[list[Group | Single], Exception | None]:
        """See :class:`replicax.execution.steps.Source`."""
        takens, error = self._iterator._given(lambda running: running.take(steps, staged))
        self._takens = joined_where_alike(takens)
        return [taken.group for taken in self._takens], error

    def give_back(self, groups: Sequence[Group | Single]) -> None:
        """See :class:`replicax.execution.steps.Source`."""
        left, back = sum(group.count for group in groups), []
        for taken in reversed(self._takens):
            if left <= 0:
                break
            if left < taken.group.count:
                taken = taken.split(taken.group.count - left)[1]
            left -= taken.group.count
            back.append(taken)
        self._iterator._running.give_back(back[::-1])


def source_of(iterator: Any, extended: StrategyExtended) -> IteratorSource:
    """The elements of ``iterator``, if it belongs to the strategy.

    Raises:
      TypeError: it is no iterator of a distributed dataset.
      ValueError: its dataset was distributed by another strategy; or it has been closed.
    """
    from replicax.data.dataset import DistributedDataset
    from replicax.data.iterator import DistributedIterator

    if not isinstance(iterator, DistributedIterator):
        hint = "the dataset itself: pass iter(dataset)" if isinstance(iterator, DistributedDataset) else repr(iterator)
        raise TypeError(
            "strategy.run_steps(fn, iterator, steps): iterator must be one of a dataset of this strategy, "
            f"iter(strategy.distribute_dataset(…)), got {hint}"
        )
    if iterator._dataset._feed.owner is not extended:
        raise ValueError(
            "strategy.run_steps(fn, iterator, steps): the iterator's dataset was distributed by another strategy, "
            "whose replicas have the elements: distribute the dataset with this one"
        )
    iterator._check_open()
    return IteratorSource(iterator)
