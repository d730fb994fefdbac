"""For whom a dataset is: the workers, and the replicas of each."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from replicax.data.elements.to_devices import feeder
from replicax.data.input_context import InputContext, shares
from replicax.workers.exchange import Workers
from replicax.workers.lockstep import Lockstep
from replicax.workers.replicas import Replicas

if TYPE_CHECKING:
    from replicax.data.elements.elements import Element
    from replicax.data.elements.staging import Staged


@dataclasses.dataclass(frozen=True)
class Feed:
    """For whom a dataset is.

    Attributes:
      lockstep: of the workers who read it, each a part.
      ranges: which replicas each worker feeds.
      placer: makes the function that puts elements on the devices.
      name: to tell the dataset from others, the same on all workers.
      owner: the replicas that the elements are for.
    """

    lockstep: Lockstep
    ranges: tuple[range, ...]
    placer: Callable[[], Callable[[Element | Staged], Any]]
    name: str = "input"
    owner: Replicas | None = None

    @property
    def workers(self) -> Workers:
        """Who read it."""
        return self.lockstep.workers

    @property
    def replicas(self) -> int:
        """How many there are on all workers."""
        return self.ranges[-1].stop

    @property
    def mine(self) -> range:
        """The replicas that this worker feeds."""
        return self.ranges[self.workers.index]

    @property
    def context(self) -> InputContext:
        """What functions that make datasets are told."""
        return InputContext(self.workers.count, self.workers.index, self.replicas)

    def rows_of_workers(self, batch: int) -> list[int]:
        """How many rows of a batch are for each worker, where workers read batches of their own."""
        bounds = [-(-batch * mine.stop // self.replicas) for mine in self.ranges]
        return [stop - start for start, stop in zip([0, *bounds], bounds, strict=False)]

    def rows_of_replicas(self, batch: int, shared: bool) -> tuple[int, ...]:
        """How many rows of a full batch each replica gets; ``shared`` if all workers have the same batches."""
        if shared:
            return tuple(shares(batch, self.replicas))
        rows = self.rows_of_workers(batch)
        return tuple(x for size, mine in zip(rows, self.ranges, strict=True) for x in shares(size, len(mine)))


_numbers: weakref.WeakKeyDictionary[Replicas, itertools.count[int]] = weakref.WeakKeyDictionary()


def feed_of(replicas: Replicas) -> Feed:
    """The feed of the next dataset for ``replicas``. All workers make their datasets in the same order."""
    owners = [device.process_index for device in replicas.devices]
    ranges = []
    for _, group in itertools.groupby(range(len(owners)), owners.__getitem__):
        mine = list(group)
        ranges.append(range(mine[0], mine[-1] + 1))
    number = next(_numbers.setdefault(replicas, itertools.count()))
    return Feed(replicas.lockstep, tuple(ranges), lambda: feeder(replicas.mesh), f"dataset {number}", replicas)
