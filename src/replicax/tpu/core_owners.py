"""The content of the pictures of a slice, in the terminal and on paper: the owner of each core, and its colour."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from replicax.tpu.assignment import DeviceAssignment
from replicax.tpu.topology import Topology

# Paul Tol's bright colours, which colour-blind people can tell apart, and two more.
COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCA011", "#3BAFD0", "#AA3377", "#E0702B", "#3A9E8C")
INK, MUTED, LINE, SHARED, PAPER = "#22262B", "#6B7280", "#C4CAD3", "#E9ECF1", "#FFFFFF"


@dataclass(frozen=True)
class CoreOwners:
    """The owner of each core: a replica if there is an assignment, otherwise a host."""

    topology: Topology  # the slice
    owner: np.ndarray  # the number of the owner of each core, int64 in the shape of the mesh; -1: none, -2: missing
    member: np.ndarray  # the number of the replica's logical device (or the host's device) on each core
    colours: np.ndarray  # for each owner an index into ``COLOURS``, int64 ``[owners]``. Neighbours have different ones.
    whose: str  # ``"replica"`` or ``"host"``
    what: str  # ``"logical device"`` or ``"device"``
    single: bool  # whether every owner has one core, so that its number is a sufficient label

    def label(self, at: tuple[int, ...]) -> str:
        """The label of a core: ``"3"``, or ``"3·1"`` for logical device 1 of replica 3; empty without an owner."""
        owner, member = self.owner[at], self.member[at]
        return "" if owner < 0 else f"{owner}" if self.single else f"{owner}·{member}"

    def colour(self, at: tuple[int, ...]) -> str:
        """The colour of a core."""
        owner = self.owner[at]
        return SHARED if owner < 0 else COLOURS[self.colours[owner]]

    def layers(self) -> range:
        """The planes of chips, which are drawn separately: values of z."""
        return range(self.topology.torus.shape[2])

    def legend(self) -> str:
        """The meaning of the labels."""
        return self.whose if self.single else f"{self.whose}·{self.what}"


def core_owners(topology: Topology, assignment: DeviceAssignment | None) -> CoreOwners:
    """The content of a picture of ``topology``."""
    if not isinstance(assignment, DeviceAssignment | None):
        raise TypeError(f"the device assignment must be a replicax.DeviceAssignment or None, got {assignment!r}")
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
    """A colour for each owner, in rotation, avoiding those of its neighbours."""
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
    colours = np.full(owners, -1)
    for one in range(owners):
        taken = {int(colours[other]) for other in neighbours.get(one, ())}
        choices = [(one + i) % len(COLOURS) for i in range(len(COLOURS))]
        colours[one] = next((c for c in choices if c not in taken), choices[0])
    return colours
