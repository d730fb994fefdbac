"""What the pictures of a slice show, in the terminal and on paper: who has which core, and in which colour."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from replicax.tpu.assignment import DeviceAssignment
from replicax.tpu.topology import Topology

# Paul Tol's bright colours, which stay apart for the colour-blind too, and two more.
COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCA011", "#3BAFD0", "#AA3377", "#E0702B", "#3A9E8C")
INK, MUTED, LINE, SHARED, PAPER = "#22262B", "#6B7280", "#C4CAD3", "#E9ECF1", "#FFFFFF"


@dataclass(frozen=True)
class CoreOwners:
    """Who has which core: replicas, if there is an assignment; and otherwise hosts.

    Attributes:
      topology: the slice.
      owner: the replica (or host) that has each core, int64 in the shape of the mesh; -1: nobody's, -2: missing.
      member: which logical device of the replica (or device of the host) it is.
      colours: of each owner: an index into ``COLOURS``, int64 ``[owners]``. Neighbours have different ones.
      whose: ``"replica"`` or ``"host"``.
      what: ``"logical device"`` or ``"device"``.
      single: whether every owner has one core, so that its number says it all.
    """

    topology: Topology
    owner: np.ndarray
    member: np.ndarray
    colours: np.ndarray
    whose: str
    what: str
    single: bool

    def label(self, at: tuple[int, ...]) -> str:
        """What is written on a core: ``"3"``, or ``"3·1"`` for logical device 1 of replica 3; nothing if nobody's."""
        owner, member = self.owner[at], self.member[at]
        return "" if owner < 0 else f"{owner}" if self.single else f"{owner}·{member}"

    def colour(self, at: tuple[int, ...]) -> str:
        """The colour of a core."""
        owner = self.owner[at]
        return SHARED if owner < 0 else COLOURS[self.colours[owner]]

    def layers(self) -> range:
        """The planes of chips, which are drawn one by one: values of z."""
        return range(self.topology.torus.shape[2])

    def legend(self) -> str:
        """What the labels mean."""
        return f"{self.whose}" if self.single else f"{self.whose}·{self.what}"


def core_owners(topology: Topology, assignment: DeviceAssignment | None) -> CoreOwners:
    """What a picture of ``topology`` shows.

    Raises:
      ValueError: the assignment is of another topology.
    """
    if assignment is not None and assignment.topology != topology:
        raise ValueError(f"the device assignment is of another topology: {assignment.topology!r}, not {topology!r}")
    cores = topology.device_coordinates if assignment is None else assignment.core_assignment
    owner, member = np.full(topology.mesh_shape, -1), np.full(topology.mesh_shape, -1)
    at = tuple(np.moveaxis(cores, -1, 0))
    owner[at], member[at] = np.indices(cores.shape[:2])
    owner[tuple(topology.missing_devices.T)] = -2
    return CoreOwners(
        topology,
        owner,
        member,
        _colours(topology, owner, len(cores)),
        "host" if assignment is None else "replica",
        "device" if assignment is None else "logical device",
        cores.shape[1] == 1,
    )


def _colours(topology: Topology, owner: np.ndarray, owners: int) -> np.ndarray:
    """A colour for each owner, in turn, but none that a neighbour has already."""
    ends = topology.torus.links()
    a, b = owner[tuple(ends[:, 0].T)], owner[tuple(ends[:, 1].T)]
    linked = np.stack(np.broadcast_arrays(a[:, :, None], b[:, None, :]), axis=-1)
    on_one_chip = np.stack([owner[..., :-1], owner[..., 1:]], axis=-1)
    beside = np.concatenate([linked.reshape(-1, 2), on_one_chip.reshape(-1, 2)])
    beside = np.unique(beside[(beside[:, 0] != beside[:, 1]) & (beside >= 0).all(1)], axis=0)
    neighbours: dict[int, set[int]] = {}
    for a, b in beside.tolist():
        neighbours.setdefault(a, set()).add(b)
        neighbours.setdefault(b, set()).add(a)
    found = np.full(owners, -1)
    for one in range(owners):
        taken = {int(found[other]) for other in neighbours.get(one, ())}
        choices = [(one + i) % len(COLOURS) for i in range(len(COLOURS))]
        found[one] = next((c for c in choices if c not in taken), choices[0])
    return found
