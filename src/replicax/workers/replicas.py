"""``Replicas``: the part of a strategy that the lower rooms use."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from replicax.communication import CommunicationOptions
from replicax.devices.mesh import REPLICA_AXIS
from replicax.workers.lockstep import Lockstep

if TYPE_CHECKING:
    from replicax.strategy import Strategy


class RemoteVariables(Protocol):
    """Where the variables of a strategy live, if not in this process, and who else uses them.

    A step runs on copies: they are brought before it, and what it has changed is sent after it. The rooms below the
    strategy call these methods, and know nothing of servers.
    """

    @property
    def groups(self) -> int:
        """How many groups of replicas, each in a process, train in step; 1 if each goes its own way."""

    def bring(self, slots: Iterable[Any]) -> None:
        """Bring the present values of these slots."""

    def send(self, slots: Iterable[Any]) -> None:
        """Send what a step has written into these slots."""

    def communicator(self, here: Any, count: int) -> Any:
        """How a replica reaches all others, given how it reaches the ``count`` of its group: ``here``.

        Both are a :class:`replicax.collectives.Communicator`.
        """


@dataclasses.dataclass(frozen=True, eq=False, repr=False, slots=True, weakref_slot=True)
class Replicas:
    """The replicas of a strategy: on which devices they are, and how their workers stay together.

    A strategy has one of these, which no other has, so it tells strategies apart, too.

    Attributes:
      strategy: the one that has them. ``ReplicaContext.strategy`` and ``merge_call`` hand it out; the rooms below use
        nothing else of it.
      count: how many run a step together. Those of one device have consecutive numbers.
      local: the numbers of this worker's.
      devices: the first device of each, in the order of the replicas. Several replicas may be on one.
      logical_devices: the devices that each runs on: ``[replicas, logical devices]``.
      slices: how many slices the devices are of, one after the other, with as many replicas in each; 1 if of none, and
        0 if they lie otherwise.
      mesh: of all these devices.
      is_absent: whether the devices are only described: plan mode.
      lockstep: what their workers tell each other to stay together.
      options: of collectives that are given none; ``None`` for the usual ones.
      at_once: how many of the replicas that share a device run at the same time, where they can.
      in_order: whether sums over the replicas are taken in a fixed order, and steps have the same bits on any number
        of devices.
      remote_variables: where the variables live, and which other replicas use them, if not these alone.

    >>> import replicax
    >>> replicas = replicax.MirroredStrategy(["cpu:0", "cpu:1"]).extended.replicas
    >>> replicas.count, replicas.local, dict(replicas.mesh.shape)
    (2, (0, 1), {'replica': 2})
    """

    strategy: Strategy
    count: int
    local: tuple[int, ...]
    devices: tuple[jax.Device, ...]
    logical_devices: np.ndarray
    slices: int
    mesh: Mesh
    is_absent: bool
    lockstep: Lockstep
    options: CommunicationOptions | None
    at_once: int = 1
    in_order: bool = False
    remote_variables: RemoteVariables | None = None

    @property
    def in_sync(self) -> int:
        """How many replicas share a global batch: these, and those of other groups that train in step with them."""
        return self.count if self.remote_variables is None else self.count * self.remote_variables.groups

    @property
    def num_logical_devices(self) -> int:
        """How many devices each replica runs on."""
        return int(self.logical_devices.shape[1])

    @property
    def device_count(self) -> int:
        """How many devices run replicas; the logical devices of a replica count as one."""
        return int(self.mesh.shape[REPLICA_AXIS])

    @property
    def per_device(self) -> int:
        """How many replicas each device runs."""
        return self.count // self.device_count

    @property
    def here(self) -> dict[int, jax.Device]:
        """This worker's replicas in their order, each with its (first) device."""
        return {i: self.devices[i] for i in self.local}

    def __repr__(self) -> str:
        return repr(self.strategy)  # which is what users know them by
