"""``Replicas``: the part of a strategy that lower packages use."""

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
    """The variables of a strategy that live in other processes, and the other replicas that use them.

    A step runs on copies: they are fetched before it, and its changes are sent after it. The packages below
    the strategy call these methods, and know nothing of servers.
    """

    @property
    def groups(self) -> int:
        """The number of groups of replicas, each in a process, that train in step; 1 if each trains alone."""

    def bring(self, slots: Iterable[Any]) -> None:
        """Fetch the present values of these slots."""

    def send(self, slots: Iterable[Any]) -> None:
        """Send what a step has written into these slots."""

    def communicator(self, here: Any, count: int) -> Any:
        """The :class:`replicax.collectives.Communicator` of a replica with all others.

        ``here`` is its communicator with the ``count`` replicas of its group.
        """


@dataclasses.dataclass(frozen=True, eq=False, repr=False, slots=True, weakref_slot=True)
class Replicas:
    """The replicas of a strategy: on which devices they are, and how their workers stay together.

    A strategy has one of these, which no other has, so it tells strategies apart, too.

    >>> import replicax
    >>> replicas = replicax.MirroredStrategy(["cpu:0", "cpu:1"]).extended.replicas
    >>> replicas.num_replicas, replicas.local_replicas, dict(replicas.mesh.shape)
    (2, (0, 1), {'replica': 2})
    """

    strategy: Strategy  # lower packages hand it out, and look up its programs and variables
    num_replicas: int  # that run a step together; those of one device have consecutive numbers
    local_replicas: tuple[int, ...]  # the numbers of this worker's replicas
    worker_devices: tuple[jax.Device, ...]  # the first device of each replica; several replicas may be on one
    logical_devices: np.ndarray  # of each replica: ``[replicas, logical devices]``
    slices: int  # how many follow one another, with as many replicas each; 1: no slices; 0: other arrangements
    mesh: Mesh  # of all these devices
    is_absent: bool  # whether the devices are only described: plan mode
    lockstep: Lockstep  # the exchanges that keep the workers together
    communication_options: CommunicationOptions | None  # for collectives without their own; ``None`` for the defaults
    replicas_at_once: int = 1  # how many replicas of a device run at the same time, where they can
    reproducible: bool = False  # whether sums are taken in a fixed order, with the same bits on any number of devices
    remote_variables: RemoteVariables | None = None  # where the variables are, unless only these replicas use them

    @property
    def in_sync(self) -> int:
        """The number of replicas that share a global batch: these, and those of groups that train in step with them."""
        return self.num_replicas * (1 if self.remote_variables is None else self.remote_variables.groups)

    @property
    def num_logical_devices(self) -> int:
        """The number of devices of each replica."""
        return int(self.logical_devices.shape[1])

    @property
    def device_count(self) -> int:
        """The number of devices that run replicas; the logical devices of a replica count as one."""
        return int(self.mesh.shape[REPLICA_AXIS])

    @property
    def per_device(self) -> int:
        """The number of replicas of each device."""
        return self.num_replicas // self.device_count

    @property
    def local_devices(self) -> dict[int, jax.Device]:
        """The (first) device of each of this worker's replicas, by the replica's number."""
        return {i: self.worker_devices[i] for i in self.local_replicas}

    def __repr__(self) -> str:
        return repr(self.strategy)  # the name that users know
