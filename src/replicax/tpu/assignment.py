"""``DeviceAssignment``: the cores of each replica."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from replicax.argument_checks import as_integer, checked_integer
from replicax.errors import shortened
from replicax.system.quantities import counted
from replicax.tpu.topology import Topology, as_coordinates, as_text
from replicax.tpu.torus import first_repetition, points, ring_order

_FOR_GPUS = ". Assignments are of TPU cores; for GPUs: MirroredStrategy(resolver.devices, num_logical_devices=2), say"


class DeviceAssignment:
    """Assigns the cores of a slice to replicas and their logical devices.

    :meth:`build` makes good assignments from a shape; the constructor takes an explicit list of cores.

    Args:
      topology: the slice.
      core_assignment: integers ``[replicas, cores of a replica, 4]``, the coordinates ``(x, y, z, core)`` of each
        replica's cores in the order of its logical devices; or 3, ``(x, y, core)``.

    Attributes:
      topology: the slice.

    Raises:
      ValueError: a wrong shape; a core that the slice does not have; a core that is assigned twice.
      TypeError: ``topology`` is not a :class:`Topology`.

    >>> import replicax
    >>> topology = replicax.Topology.from_name("v3:2x2")
    >>> assignment = replicax.DeviceAssignment(topology, [[(0, 0, 0), (0, 0, 1)], [(1, 0, 0), (1, 0, 1)]])
    >>> assignment.num_replicas, assignment.num_cores_per_replica
    (2, 2)
    """

    def __init__(self, topology: Topology, core_assignment: ArrayLike) -> None:
        if not isinstance(topology, Topology):
            raise TypeError(
                f"DeviceAssignment: topology must be a Topology, got {shortened(repr(topology))}{_FOR_GPUS}"
            )
        cores = as_coordinates(core_assignment, "DeviceAssignment: core_assignment")
        if cores.ndim != 3 or cores.size == 0:
            raise ValueError(
                "DeviceAssignment: core_assignment must have the shape [replicas, cores of a replica, 4], got "
                f"{list(np.shape(core_assignment))}"
            )
        there = topology.has_devices(cores)
        if not there.all():
            r, c = np.argwhere(~there)[0]
            raise ValueError(
                f"DeviceAssignment: replica {r}, logical core {c}: there is no core at {as_text(cores[r, c])}; the "
                f"mesh is {as_text(topology.mesh_shape)}, with {len(topology.missing_devices)} cores missing"
            )
        if twice := first_repetition(cores):
            (r0, c0), (r1, c1) = twice
            raise ValueError(
                f"DeviceAssignment: the core at {as_text(cores[r0, c0])} is given to replica {r0}, logical core {c0}, "
                f"and to replica {r1}, logical core {c1}"
            )
        self.topology = topology
        self._cores = cores.astype(np.int32)
        self._cores.flags.writeable = False
        self._tasks = topology.task_ordinals(cores)

    @classmethod
    def build(
        cls,
        topology: Topology | bytes,
        computation_shape: Sequence[int] | None = None,
        computation_stride: Sequence[int] | None = None,
        num_replicas: int | None = 1,
        device_order_mode: str = "auto",
    ) -> DeviceAssignment:
        """Assign a block of cores to each replica, with the blocks side by side.

        All blocks have the same shape. They form a region as close to a cube as possible, and follow the order of the
        hosts, so that each host feeds consecutive replicas.

        Args:
          topology: the slice, or the bytes of :meth:`Topology.serialized`.
          computation_shape: the cores of one replica, along x, y and z and on each chip: ``(x, y, z, core)``; or three
            numbers, ``(x, y, core)``. ``None`` means one core.
          computation_stride: the distances between its cores, in the same order; other replicas fill the gaps.
            ``None`` means side by side.
          num_replicas: the number of replicas; ``None`` means as many as fit.
          device_order_mode: the order of the logical devices in the block. ``"ring"``: each is on the chip of the one
            before it or on a neighbouring chip, and the last beside the first where the shape permits, so that data
            that moves from logical device to logical device crosses one link at a time (with a stride, as many as
            the stride). ``"mesh"``: the order of the coordinates, the last one fastest. ``"auto"``: ``"ring"``.

        Raises:
          ValueError: the block does not fit into the slice; not as many fit; shapes that are not positive integers. The
            message has both numbers.

        >>> import replicax
        >>> topology = replicax.Topology.from_name("v3:4x4")
        >>> assignment = replicax.DeviceAssignment.build(topology, computation_shape=[2, 2, 2], num_replicas=4)
        >>> assignment.core_assignment[1].tolist()[:3]
        [[2, 0, 0, 0], [2, 0, 0, 1], [3, 0, 0, 0]]
        """
        if isinstance(topology, bytes):
            topology = Topology(serialized=topology)
        if not isinstance(topology, Topology):
            raise TypeError(
                f"DeviceAssignment.build: topology must be a Topology, got {shortened(repr(topology))}{_FOR_GPUS}"
            )
        if device_order_mode not in ("auto", "ring", "mesh"):
            raise ValueError(
                f"DeviceAssignment.build: device_order_mode must be 'auto', 'ring' or 'mesh', got {device_order_mode!r}"
            )
        shape = _sizes(computation_shape, "computation_shape")
        stride = _sizes(computation_stride, "computation_stride")
        _check_footprint(topology, shape, stride, computation_shape)
        starts = _starts(topology, shape, stride)
        block = _block(topology, shape, stride, device_order_mode)
        cells = starts[:, None] + block
        free = topology.has_devices(cells).all(-1)
        room = int(free.sum())
        if num_replicas is None and not room:
            raise ValueError(f"DeviceAssignment.build: every block of {as_text(shape)} cores has one that is missing")
        what = "DeviceAssignment.build: num_replicas"
        wanted = room if num_replicas is None else checked_integer(num_replicas, what)
        if wanted > room:
            raise ValueError(
                f"DeviceAssignment.build: {wanted} replicas wanted, but there is room for {room}: each takes "
                f"{math.prod(shape)} core(s), as {as_text(shape)} with stride {as_text(stride)}, of a mesh of "
                f"{as_text(topology.mesh_shape)}"
                + (f", in which {len(topology.missing_devices)} cores are missing" if room < len(starts) else "")
            )
        cells = cells[free][:wanted] if room < len(starts) else cells[_compact(topology, shape, stride, wanted)]
        return cls(topology, cells[np.argsort(topology.task_ordinals(cells[:, 0]), kind="stable")])

    @classmethod
    def one_core_each(cls, topology: Topology) -> DeviceAssignment:
        """A replica on every core, in the order of the tasks and of the devices in them.

        >>> import replicax
        >>> replicax.DeviceAssignment.one_core_each(replicax.Topology.from_name("v3:2x2")).num_replicas
        8
        """
        return cls(topology, topology.device_coordinates.reshape(-1, 1, topology.mesh_rank))

    # --- positions --------------------------------------------------------------------------------------

    @property
    def core_assignment(self) -> np.ndarray:
        """The coordinates of every core: int32 ``[replicas, cores of a replica, 4]``."""
        return self._cores

    @property
    def logical_to_tpu(self) -> np.ndarray:
        """Another name of :attr:`core_assignment`: from a replica and a logical device to a core."""
        return self._cores

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return int(self._cores.shape[0])

    @property
    def num_cores_per_replica(self) -> int:
        """The number of logical devices of each replica."""
        return int(self._cores.shape[1])

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, int, int, int]:
        """The coordinates of a logical device: ``(x, y, z, core)``. Raises a ``ValueError`` if it does not exist."""
        for what, index, count in (
            ("replica", replica, self.num_replicas),
            ("logical core", logical_core, self.num_cores_per_replica),
        ):
            if as_integer(index) is None or not 0 <= index < count:
                raise ValueError(f"there is no {what} {index!r}: this assignment has {count}, from 0 to {count - 1}")
        x, y, z, core = (int(n) for n in self._cores[replica, logical_core])
        return x, y, z, core

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """The replicas whose logical device ``logical_core`` the task ``task_id`` drives, in order.

        Raises:
          ValueError: there are none, or there is no such logical device.

        >>> import replicax
        >>> topology = replicax.Topology.from_name("v3:4x4")
        >>> replicax.DeviceAssignment.build(topology, [1, 1, 2], num_replicas=16).lookup_replicas(1, 0)
        [4, 5, 6, 7]
        """
        self.coordinates(0, logical_core)
        found = np.flatnonzero(self._tasks[:, logical_core] == task_id).tolist()
        if not found:
            raise ValueError(
                f"task {task_id} drives no logical core {logical_core} of any replica; tasks that do: "
                f"{sorted(set(self._tasks[:, logical_core].tolist()))}"
            )
        return found

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """The number of a logical device's core among the devices of its task."""
        return self.topology.tpu_device_ordinal_at_coordinates(self.coordinates(replica, logical_core))

    def host_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """The name of the CPU of the host that drives a logical device."""
        return self.topology.cpu_device_name_at_coordinates(self.coordinates(replica, logical_core), job)

    def tpu_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """The name of a logical device's core.

        >>> import replicax
        >>> topology = replicax.Topology.from_name("v3:2x2")
        >>> replicax.DeviceAssignment.build(topology, [1, 1, 2], num_replicas=4).tpu_device(3, 1, job="worker")
        '/job:worker/task:0/device:TPU:7'
        """
        return self.topology.tpu_device_name_at_coordinates(self.coordinates(replica, logical_core), job)

    def tasks(self) -> np.ndarray:
        """The task that drives each logical device: int32 ``[replicas, cores of a replica]``."""
        return self._tasks

    def hops(self) -> np.ndarray:
        """The number of links between each logical device and the next: int64 ``[replicas, cores of a replica]``.

        The last entry is for the way from the last one back to the first.

        >>> import replicax
        >>> topology = replicax.Topology.from_name("v5e:4x4")
        >>> replicax.DeviceAssignment.build(topology, [2, 4, 1]).hops().tolist()  # a ring
        [[1, 1, 1, 1, 1, 1, 1, 1]]
        """
        return self.topology.hops(self._cores, np.roll(self._cores, -1, axis=1))

    def show(self) -> None:
        """Draw it in the terminal; see :meth:`Topology.show`."""
        self.topology.show(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw it to a file; see :meth:`Topology.plot`."""
        self.topology.plot(path, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceAssignment:
        return self  # it is immutable

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceAssignment):
            return NotImplemented
        return self.topology == other.topology and np.array_equal(self._cores, other._cores)

    def __hash__(self) -> int:
        return hash((self.topology, self._cores.tobytes()))

    def __repr__(self) -> str:
        replicas, cores = counted(self.num_replicas, "replica"), counted(self.num_cores_per_replica, "core")
        return f"DeviceAssignment({replicas} of {cores}, {self.topology!r})"


# --- placing blocks side by side ------------------------------------------------------------------------


def _sizes(numbers: Sequence[int] | None, what: str) -> np.ndarray:
    if numbers is None:
        return np.ones(4, np.int64)
    sizes = as_coordinates(numbers, f"DeviceAssignment.build: {what}", missing_z=1)
    if sizes.ndim != 1 or (sizes < 1).any():
        raise ValueError(f"DeviceAssignment.build: {what} must be positive integers, got {numbers}")
    return sizes


def _check_footprint(topology: Topology, shape: np.ndarray, stride: np.ndarray, given: Sequence[int] | None) -> None:
    footprint = shape * stride
    if (footprint > topology.mesh_shape).any():
        hint = ""
        if given is not None and len(given) == 3:
            hint = ". Three numbers mean (x, y, core); for (x, y, z, core) give four"
        raise ValueError(
            f"DeviceAssignment.build: a replica of {as_text(shape)} cores with stride {as_text(stride)} has a "
            f"footprint of {as_text(footprint)}, which exceeds the mesh of {as_text(topology.mesh_shape)} (x, y, z, "
            f"core){hint}"
        )


def _counts(topology: Topology, shape: np.ndarray, stride: np.ndarray) -> np.ndarray:
    """The number of blocks that fit along each coordinate: with a stride, several interleave in one footprint."""
    return topology.mesh_shape // (shape * stride) * stride


def _places(counts: np.ndarray) -> np.ndarray:
    """The places of the blocks in the order of assignment, ``[blocks, 4]``: core first, then x, y and z."""
    z_y_x_core = [2, 1, 0, 3]
    return points(counts[z_y_x_core])[:, z_y_x_core]


def _starts(topology: Topology, shape: np.ndarray, stride: np.ndarray) -> np.ndarray:
    """The first core of each block, ``[blocks, 4]``."""
    places = _places(_counts(topology, shape, stride))
    return places // stride * (shape * stride) + places % stride


def _block(topology: Topology, shape: np.ndarray, stride: np.ndarray, mode: str) -> np.ndarray:
    """The cores of the first block in the order of the logical devices, ``[cores, 4]``."""
    if mode == "mesh":
        return points(shape) * stride
    torus = topology.torus
    spans = [wraps and a * s == size for wraps, a, s, size in zip(torus.wrap, shape, stride, torus.shape, strict=False)]
    chips = ring_order([int(size) for size in shape[:3]], spans)
    cores = np.arange(shape[3])
    return np.insert(np.repeat(chips, len(cores), axis=0), 3, np.tile(cores, len(chips)), axis=1) * stride


def _compact(topology: Topology, shape: np.ndarray, stride: np.ndarray, wanted: int) -> np.ndarray:
    """The indices of the ``wanted`` blocks that are closest together: a box, as close to a cube as fits.

    The dims with the least room are filled first, which keeps all later choices possible, and among equals the cores of
    a chip, so that replicas share chips.
    """
    counts = _counts(topology, shape, stride)
    box = np.ones(4, np.int64)
    remaining = wanted
    for done, dim in enumerate(sorted(range(4), key=lambda dim: (counts[dim], (dim + 1) % 4))):
        side = math.ceil(remaining ** (1 / (4 - done)) - 1e-9)
        box[dim] = min(side, counts[dim])
        remaining = -(-remaining // int(box[dim]))
    return np.flatnonzero((_places(counts) < box).all(-1))[:wanted]
