"""``Topology``: the cores of a TPU slice, their coordinates, and the hosts that drive them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from replicax.errors import shortened
from replicax.system.json_files import parsed
from replicax.system.packages import PICTURES, check_installed
from replicax.system.quantities import counted
from replicax.tpu.generations import HOST, parse_slice, slice_name
from replicax.tpu.torus import Torus, first_repetition, points

if TYPE_CHECKING:
    from replicax.tpu.assignment import DeviceAssignment


class Topology:
    """The cores of a TPU slice, their coordinates, and the tasks (processes, one a host) that drive them.

    A core's coordinates are ``(x, y, z, core)``: its chip's place in the slice, and its number on the chip. If chips
    form a plane, three numbers suffice: ``(x, y, core)``. A core is what JAX calls a device, so on generations whose
    cores act as one (megacore), and on those with one core, the last coordinate is always 0.

    It consists of numbers only. Nothing here asks JAX for a device, and a slice of 6,144 chips takes milliseconds.

    Args:
      serialized: the bytes of :meth:`serialized`; the other arguments are then ignored.
      mesh_shape: chips along x, y and z, and cores of a chip: four positive integers, or three for
        ``(x, y, core)``.
      device_coordinates: integers ``[tasks, devices of a task, 4]`` (or 3): the place of each device of each task.
      wrap: whether links wrap around from the last chip to the first, along x, y and z.
      name: such as ``"v5e:4x4"``.

    Attributes:
      torus: the grid of its chips, with the links between them.
      name: as given.

    Raises:
      ValueError: coordinates of a wrong shape, outside the mesh, or given to two devices.

    >>> import replicax
    >>> topology = replicax.Topology.from_name("v3:4x4")
    >>> topology.mesh_shape.tolist(), topology.num_tasks, topology.num_tpus_per_task
    ([4, 4, 1, 2], 4, 8)
    >>> topology.tpu_device_name_at_coordinates((2, 1, 0, 1))
    '/task:1/device:TPU:5'
    """

    def __init__(
        self,
        serialized: bytes | None = None,
        mesh_shape: ArrayLike | None = None,
        device_coordinates: ArrayLike | None = None,
        wrap: Sequence[bool] = (False, False, False),
        name: str | None = None,
    ) -> None:
        if serialized is not None:
            mesh_shape, device_coordinates, wrap, name = _parsed_topology(serialized)
        if mesh_shape is None or device_coordinates is None:
            raise ValueError("Topology: needs mesh_shape and device_coordinates, or serialized")
        mesh = as_coordinates(mesh_shape, "mesh_shape", missing_z=1)
        if mesh.ndim != 1 or (mesh < 1).any():
            raise ValueError(f"Topology: mesh_shape must be four positive integers, got {mesh_shape!r}")
        coordinates = as_coordinates(device_coordinates, "device_coordinates")
        if coordinates.ndim != 3 or coordinates.size == 0:
            raise ValueError(
                f"Topology: device_coordinates must have the shape [tasks, devices of a task, 4], got "
                f"{list(np.shape(device_coordinates))}"
            )
        outside = (coordinates < 0) | (coordinates >= mesh)
        if outside.any():
            task, device = np.argwhere(outside.any(-1))[0]
            raise ValueError(
                f"Topology: device {device} of task {task} is at {as_text(coordinates[task, device])}, outside the "
                f"mesh of {as_text(mesh)}"
            )
        if np.shape(wrap) != (3,):
            raise ValueError(f"Topology: wrap is a bool each for x, y and z, got {wrap!r}")
        self.name = name
        x, y, z, _ = mesh.tolist()
        self.torus = Torus((x, y, z), (wrap[0], wrap[1], wrap[2]))
        self._mesh_shape = _frozen(mesh.astype(np.int32))
        self._device_coordinates = _frozen(coordinates.astype(np.int32))
        self._tasks, self._ordinals = self._inverted_coordinates()

    def _inverted_coordinates(self) -> tuple[np.ndarray, np.ndarray]:
        """The task, and the ordinal in it, of the device at each place of the mesh; -1 without a device."""
        tasks = np.full(self._mesh_shape, -1, np.int32)
        ordinals = tasks.copy()
        at = tuple(np.moveaxis(self._device_coordinates, -1, 0))
        task, ordinal = np.indices(self._device_coordinates.shape[:2])
        tasks[at], ordinals[at] = task, ordinal
        if twice := first_repetition(self._device_coordinates):
            (i, j), (k, m) = twice
            raise ValueError(
                f"Topology: device {j} of task {i} and device {m} of task {k} are both at "
                f"{as_text(self._device_coordinates[i, j])}"
            )
        return _frozen(tasks), _frozen(ordinals)

    @classmethod
    def from_name(cls, name: str) -> Topology:
        """The slice for a name such as ``"v5e:4x4"`` or ``"v5p:16x16x24"``, as JAX would show it.

        Google's names with a number of cores, such as ``"v5p-128"``, mean the slice's default shape. It needs no TPU
        and no libtpu.

        Raises:
          ValueError: there is no such slice; the message lists some.

        >>> import replicax
        >>> replicax.Topology.from_name("v5p:4x4x8")
        Topology('v5p:4x4x8', 4x4x8 chips of 1 device, 32 hosts, wraps around along x, y, z)
        """
        kind, shape = parse_slice(name)
        return cls.of_chips(shape, kind.devices_per_chip, wrap=kind.wrap(shape), name=slice_name(name))

    @classmethod
    def of_chips(
        cls,
        chips: Sequence[int],
        cores: int = 1,
        wrap: Sequence[bool] = (False, False, False),
        name: str | None = None,
    ) -> Topology:
        """A full slice, with a task for each host of 2x2 chips (of one row along an odd dim).

        Args:
          chips: along x, y and z.
          cores: devices of a chip.
          wrap: as for :class:`Topology`.
          name: the same.

        Raises:
          ValueError: ``chips`` does not have three numbers, or one is not positive.

        >>> import replicax
        >>> replicax.Topology.of_chips((4, 2, 1), cores=2).num_tasks
        2
        """
        mesh = as_coordinates((*chips, cores), "Topology.of_chips: chips and cores")
        if len(chips) != 3 or (mesh < 1).any():
            raise ValueError(f"Topology.of_chips: expected three positive numbers and one, got {chips} and {cores}")
        # Hosts of two chips do not fill an odd dim: there a host has a row of one chip.
        tile = np.array([t if size % t == 0 else 1 for size, t in zip(mesh, (*HOST, mesh[3]), strict=True)])
        hosts = mesh // tile
        # Tasks are numbered along x first, and so are the chips of a host; the cores of a chip are neighbours.
        host = points(hosts[[2, 1, 0]])[:, [2, 1, 0]]
        device = points(tile[[2, 1, 0, 3]])[:, [2, 1, 0, 3]]
        corner = np.insert(host * tile[:3], 3, 0, axis=1)
        return cls(mesh_shape=mesh, device_coordinates=corner[:, None] + device, wrap=wrap, name=name)

    # --- shape ------------------------------------------------------------------------------------------

    @property
    def mesh_shape(self) -> np.ndarray:
        """Chips along x, y and z, and cores of a chip: int32 ``[4]``."""
        return self._mesh_shape

    @property
    def mesh_rank(self) -> int:
        """The number of coordinates of a core: 4."""
        return len(self._mesh_shape)

    @property
    def device_coordinates(self) -> np.ndarray:
        """The coordinates of each device: int32 ``[tasks, devices of a task, 4]``."""
        return self._device_coordinates

    @property
    def missing_devices(self) -> np.ndarray:
        """The coordinates without a device: int64 ``[missing, 4]``."""
        return np.argwhere(self._tasks < 0)

    @property
    def num_tasks(self) -> int:
        """The number of tasks that drive devices of the slice: one for each host."""
        return int(self._device_coordinates.shape[0])

    @property
    def num_tpus_per_task(self) -> int:
        """The number of devices of each task."""
        return int(self._device_coordinates.shape[1])

    @property
    def num_devices(self) -> int:
        """The number of devices of the slice."""
        return self.num_tasks * self.num_tpus_per_task

    def hops(self, a: ArrayLike, b: ArrayLike) -> np.ndarray:
        """The number of links between the chips of cores ``a`` and ``b``, on the shortest way.

        Args:
          a: coordinates ``[..., 4]`` (or 3).
          b: the same; shapes broadcast.

        Returns:
          int64 ``[...]``: 0 for cores of one chip, 1 for neighbours.

        Raises:
          ValueError: coordinates outside the mesh. (Chips of missing devices do have links.)

        >>> import replicax
        >>> int(replicax.Topology.from_name("v5e:16x16").hops((0, 0, 0, 0), (15, 2, 0, 0)))  # around the edge
        3
        """
        return self.torus.hops(self._inside(a, "a")[..., :3], self._inside(b, "b")[..., :3])

    # --- devices by coordinates -------------------------------------------------------------------------

    def has_devices(self, coordinates: ArrayLike) -> np.ndarray:
        """Return whether there is a device at each of these coordinates: bool ``[...]`` for ``[..., 4]`` (or 3)."""
        at = as_coordinates(coordinates, "coordinates")
        inside = self._are_inside(at)
        return inside & (self._tasks[tuple(np.moveaxis(np.where(inside[..., None], at, 0), -1, 0))] >= 0)

    def task_ordinals(self, coordinates: ArrayLike) -> np.ndarray:
        """The tasks that drive the devices at ``[..., 4]``: int32 ``[...]``."""
        return self._tasks[self._checked_coordinates(coordinates)]

    def tpu_device_ordinals(self, coordinates: ArrayLike) -> np.ndarray:
        """The numbers of the devices at ``[..., 4]`` within their tasks: int32 ``[...]``."""
        return self._ordinals[self._checked_coordinates(coordinates)]

    def task_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """The task that drives the device at these coordinates. ``ValueError``: there is none."""
        return int(self.task_ordinals(device_coordinates))

    def tpu_device_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """The number, within its task, of the device at these coordinates. ``ValueError``: there is none."""
        return int(self.tpu_device_ordinals(device_coordinates))

    def cpu_device_name_at_coordinates(self, device_coordinates: Sequence[int], job: str | None = None) -> str:
        """The name of the CPU of the host that drives the device at these coordinates.

        >>> import replicax
        >>> replicax.Topology.from_name("v5e:4x4").cpu_device_name_at_coordinates((3, 3, 0), job="worker")
        '/job:worker/task:3/device:CPU:0'
        """
        return f"{_job(job)}/task:{self.task_ordinal_at_coordinates(device_coordinates)}/device:CPU:0"

    def tpu_device_name_at_coordinates(self, device_coordinates: Sequence[int], job: str | None = None) -> str:
        """The name of the device at these coordinates.

        >>> import replicax
        >>> replicax.Topology.from_name("v5e:4x4").tpu_device_name_at_coordinates((3, 3, 0), job="worker")
        '/job:worker/task:3/device:TPU:3'
        """
        task = self.task_ordinal_at_coordinates(device_coordinates)
        return f"{_job(job)}/task:{task}/device:TPU:{self.tpu_device_ordinal_at_coordinates(device_coordinates)}"

    def _are_inside(self, at: np.ndarray) -> np.ndarray:
        inside: np.ndarray = np.all((at >= 0) & (at < self._mesh_shape), axis=-1)
        return inside

    def _inside(self, coordinates: ArrayLike, what: str) -> np.ndarray:
        at = as_coordinates(coordinates, what)
        inside = self._are_inside(at)
        if not inside.all():
            raise ValueError(f"{what} is at {_first_not(inside, at)}, outside the mesh of {as_text(self._mesh_shape)}")
        return at

    def _checked_coordinates(self, coordinates: ArrayLike) -> tuple[np.ndarray, ...]:
        at = as_coordinates(coordinates, "coordinates")
        there = self.has_devices(at)
        if not there.all():
            off = _first_not(there, at)
            raise ValueError(f"there is no core at {off}: {self!r} has a mesh of {as_text(self._mesh_shape)}")
        return tuple(np.moveaxis(at, -1, 0))

    # --- output -----------------------------------------------------------------------------------------

    def serialized(self) -> bytes:
        """The topology as bytes (JSON), to store or to send; ``Topology(serialized=...)`` restores it.

        >>> import replicax
        >>> topology = replicax.Topology.from_name("v2:2x2")
        >>> replicax.Topology(serialized=topology.serialized()) == topology
        True
        """
        facts: dict[str, Any] = {
            "name": self.name,
            "mesh_shape": self._mesh_shape.tolist(),
            "wrap": list(self.torus.wrap),
            "device_coordinates": self._device_coordinates.tolist(),
        }
        return json.dumps(facts, separators=(",", ":")).encode()

    def show(self, assignment: DeviceAssignment | None = None) -> None:
        """Draw it in the terminal: chips, cores, hosts; with an assignment, replicas and logical devices.

        >>> import replicax
        >>> replicax.Topology.from_name("v5e:2x2").show()
        Topology('v5e:2x2', 2x2x1 chips of 1 device, 1 host, no wrap-around)
        <BLANKLINE>
         0·0   0·1...
         0·2   0·3...
        a core: host·device   x goes right, y down
        """
        from replicax.tpu.terminal import show

        show(self, assignment)

    def plot(self, path: str | os.PathLike[str], assignment: DeviceAssignment | None = None) -> None:
        """Draw it to a file, PNG or SVG: chips, cores, hosts, links; with an assignment, replicas too.

        Args:
          path: ends in ``.png`` or ``.svg``.
          assignment: an assignment of this topology.

        Raises:
          ValueError: another ending; an assignment of another topology.
          ImportError: Matplotlib is not installed.
        """
        check_installed("Topology.plot", *PICTURES)
        from replicax.tpu.figure import plot

        plot(self, path, assignment)

    def __deepcopy__(self, memo: dict[int, Any]) -> Topology:
        return self  # it is immutable

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Topology):
            return NotImplemented
        return (
            self.torus == other.torus
            and np.array_equal(self._mesh_shape, other._mesh_shape)
            and np.array_equal(self._device_coordinates, other._device_coordinates)
        )

    def __hash__(self) -> int:
        return hash((self.torus, self._device_coordinates.tobytes()))

    def __repr__(self) -> str:
        chips = "x".join(map(str, self.torus.shape))
        parts = [
            f"{chips} chip{'s' * (chips != '1x1x1')} of {counted(int(self._mesh_shape[3]), 'device')}",
            counted(self.num_tasks, "host"),
            *([f"{counted(len(self.missing_devices), 'device')} missing"] if len(self.missing_devices) else []),
            f"wraps around along {self.torus.around}" if self.torus.around else "no wrap-around",
        ]
        return f"Topology({', '.join([*([repr(self.name)] if self.name else []), *parts])})"


def as_coordinates(values: ArrayLike, what: str, missing_z: int = 0) -> np.ndarray:
    """Integers ``[..., 4]``; three numbers mean ``(x, y, core)``, with ``missing_z`` for z."""
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.asarray(None)  # ragged
    if array.dtype.kind not in "iu" or array.ndim == 0 or array.shape[-1] not in (3, 4):
        raise ValueError(
            f"{what} must be integers (x, y, z, core), or (x, y, core) where chips lie in a plane, got {values!r}"
        )
    array = array.astype(np.int64)
    return np.insert(array, 2, missing_z, axis=-1) if array.shape[-1] == 3 else array


def as_text(coordinates: np.ndarray) -> str:
    """Coordinates in messages: ``"(2, 0, 0, 1)"``."""
    return str(tuple(coordinates.tolist()))


def _parsed_topology(serialized: bytes) -> tuple[Any, Any, Any, Any]:
    try:
        facts = parsed(serialized)
        return facts["mesh_shape"], facts["device_coordinates"], facts["wrap"], facts["name"]
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(
            f"Topology: serialized must be what Topology.serialized() returned, got {shortened(repr(serialized))}"
        ) from error


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def _first_not(wanted: np.ndarray, at: np.ndarray) -> str:
    """The first of the coordinates ``[..., 4]`` for which ``wanted`` is false."""
    return as_text(at.reshape(-1, 4)[~wanted.reshape(-1)][0])


def _job(job: str | None) -> str:
    return "" if job is None else f"/job:{job}"
