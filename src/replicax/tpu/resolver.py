"""``TPUClusterResolver``: finds TPUs, describes slices that do not exist, or emulates slices."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from replicax import _jax
from replicax.argument_checks import checked_integer
from replicax.cluster.accelerators import (
    JOB,
    AcceleratorResolver,
    attached_devices,
    devices_by_process,
    emulated_devices,
)
from replicax.cluster.resolver import url
from replicax.cluster.spec import ClusterSpec
from replicax.devices.mesh import slice_of
from replicax.system.environment import environment_defaults
from replicax.tpu.assignment import DeviceAssignment
from replicax.tpu.generations import HOST, generation_of, parse_slice, slice_name
from replicax.tpu.topology import Topology

_MOST_SLICES = 4096
"""More than anyone has; libtpu hangs for 2**20, and ends the process for 2**40."""


@_jax.hiding_frames_of
class TPUClusterResolver(AcceleratorResolver):
    """The available TPUs: their devices, their topology, and the addresses of their hosts.

    Args:
      tpu: where to look for real TPUs. ``None``, ``""`` and ``"local"`` mean those that JAX finds: the chips of this
        machine; on Cloud TPU and GKE those of the whole slice, after ``jax.distributed.initialize()`` in a process on
        each host.
      topology: for planning: the name of a slice that need not exist, such as ``"v5p:4x4x8"``, or Google's,
        ``"v5p-128"``. Its devices come from libtpu; steps can be compiled for them, but not run.
      emulate: for running without a TPU: a slice to emulate on CPU devices, one for each core. Either its mesh,
        ``"2x2x1x2"`` for x, y, z and cores of a chip; or a name, ``"v3:2x2"``, with that generation's cores and
        wrap-around links; or a :class:`Topology`. Create it before any code asks JAX for a device, as for
        :func:`use_cpu_devices`, which it calls.
      slices: the number of slices of this topology, joined by a data-center network: with ``topology`` or
        ``emulate``. The number of real slices is detected.

    Attributes:
      topology: the :class:`Topology` of each slice.
      slices: the number of slices, all alike.
      devices: the JAX devices: an array ``[slices * tasks, devices of a task]``. Tasks are numbered slice by slice; in
        each slice as in ``topology.device_coordinates``.
      kind: ``"attached"`` if this program's processes drive them, ``"emulated"``, or ``"absent"``: then steps can be
        compiled for them, but not run.
      task_type: the name of the job, ``"worker"``.
      task_id: the number of this process.

    Raises:
      RuntimeError: there is no TPU; libtpu is not installed; JAX has created its devices already, and they are too few.
      ValueError: more than one of the first three arguments; no such slice; slices that differ; a number of slices
        below 1 or above 4,096, or for real TPUs.

    >>> import replicax
    >>> resolver = replicax.TPUClusterResolver(emulate="2x2x1x2")
    >>> resolver.topology
    Topology(2x2x1 chips of 2 devices, 1 host, no wrap-around)
    >>> resolver.num_accelerators(), resolver.environment
    ({'TPU': 8}, 'emulated')
    """

    accelerator = "TPU"

    def __init__(
        self,
        tpu: str | None = None,
        *,
        topology: str | None = None,
        emulate: str | Topology | None = None,
        slices: int | None = None,
    ) -> None:
        if sum(bool(argument) for argument in (tpu, topology, emulate)) > 1:
            raise ValueError(
                "TPUClusterResolver: give one of tpu, topology (to plan) and emulate (to run on CPU devices), got "
                f"tpu={tpu!r}, topology={topology!r}, emulate={emulate!r}"
            )
        count = _checked_slices(slices, is_found=emulate is None and topology is None)
        if emulate is not None:
            self.topology, devices = _emulated_slice(emulate, count)
            kind = "emulated"
        elif topology is not None:
            name = slice_name(topology)
            self.topology, devices = topology_of(_absent(name, count), name)
            kind = "absent"
        else:
            self.topology, devices = topology_of(_attached_devices(tpu))
            kind = "attached"
        self.slices = len(devices) // self.topology.num_tasks
        super().__init__(devices, kind)

    @classmethod
    def connect(cls, tpu: str | None = None) -> TPUClusterResolver:
        """The resolver of real TPUs: the same as ``TPUClusterResolver(tpu)``, as JAX needs no other connection."""
        return cls(tpu)

    # --- properties -------------------------------------------------------------------------------------

    @property
    def environment(self) -> str:
        """The place of the devices: ``"local"``, ``"google_cloud"``, ``"gke"``, ``"emulated"`` or ``"absent"``."""
        if self.kind != "attached":
            return self.kind
        cluster = _jax.tpu_cluster()
        return "local" if cluster is None else cluster[0]

    def cluster_spec(self) -> ClusterSpec:
        cluster = _jax.tpu_cluster() if self.kind == "attached" else None
        return ClusterSpec({} if cluster is None else {JOB: list(cluster[1])})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a worker; ``""`` without a network.

        Args:
          task_type: only ``"worker"``, or ``None``.
          task_id: the number of the worker; ``None`` means the first, which coordinates the others.
          rpc_layer: the prefix of the address, as in ``"grpc://10.0.0.1"``; ``None`` means the resolver's.

        Raises:
          ValueError: there is no such worker.

        >>> import replicax
        >>> replicax.TPUClusterResolver(emulate="2x2x1x1").master()
        ''
        """
        self._check_task(task_type, task_id)
        cluster = self.cluster_spec()
        return url(cluster.task_address(JOB, task_id or 0), rpc_layer or self.rpc_layer) if cluster else ""

    def get_master(self) -> str:
        """Do the same as :meth:`master`."""
        return self.master()

    def get_job_name(self) -> str:
        """Return ``task_type``."""
        return JOB

    # --- devices ----------------------------------------------------------------------------------------

    def logical_devices(self, assignment: DeviceAssignment) -> np.ndarray:
        """The JAX devices of an assignment, which each slice uses: ``[slices * replicas, logical devices]``.

        Raises:
          ValueError: the assignment is of another topology.

        >>> import replicax
        >>> resolver = replicax.TPUClusterResolver(emulate="2x2x1x2")
        >>> assignment = replicax.DeviceAssignment.build(resolver.topology, [1, 1, 2], num_replicas=4)
        >>> [[d.id for d in replica] for replica in resolver.logical_devices(assignment)]
        [[0, 1], [2, 3], [4, 5], [6, 7]]
        """
        if assignment.topology != self.topology:
            raise ValueError(
                f"the device assignment is of another topology: it has {assignment.topology!r}, and the resolver found "
                f"{self.topology!r}. Build it from resolver.topology."
            )
        cores = assignment.core_assignment
        in_slice, ordinals = self.topology.task_ordinals(cores), self.topology.tpu_device_ordinals(cores)
        return np.concatenate([self.devices[first + in_slice, ordinals] for first in self.first_tasks])

    @property
    def first_tasks(self) -> range:
        """The number of the first task of each slice.

        >>> import replicax
        >>> replicax.TPUClusterResolver(emulate=replicax.Topology.from_name("v5e:1x1"), slices=2).first_tasks
        range(0, 2)
        """
        return range(0, len(self.devices), self.topology.num_tasks)

    def __repr__(self) -> str:
        several = f"{self.slices} × " if self.slices > 1 else ""
        return f"TPUClusterResolver({several}{self.topology!r}, {self.kind})"


def _checked_slices(slices: int | None, is_found: bool) -> int:
    if slices is None:
        return 1
    slices = checked_integer(slices, "TPUClusterResolver: slices")
    if slices > _MOST_SLICES:
        raise ValueError(f"TPUClusterResolver: slices must be at most {_MOST_SLICES:,}, got {slices:,}")
    if is_found:
        raise ValueError(
            f"TPUClusterResolver(slices={slices}): the slices of TPUs that are there are found; leave slices out, or "
            "say what to plan for (topology=...) or to emulate (emulate=...)"
        )
    return slices


def topology_of(devices: Sequence[jax.Device], name: str | None = None) -> tuple[Topology, np.ndarray]:
    """The topology that all slices of TPU devices have, and the devices: ``[slices * tasks, devices of a task]``.

    Raises a ValueError if they are not TPUs, or of slices that differ, or processes drive different numbers of them.
    """
    slices: dict[int, list[jax.Device]] = {}
    for d in devices:
        slices.setdefault(slice_of(d), []).append(d)
    (first, (topology, array)), *others = [(i, _one_slice(slices[i], name)) for i in sorted(slices)]
    for index, (other, _) in others:
        if other != topology:
            raise ValueError(
                f"the slices differ: slice {first} is {topology!r}, and slice {index} is {other!r}. Replicas are laid "
                "out alike in all slices: use slices of one shape, or those of one of them"
            )
    return topology, np.concatenate([array, *(its for _, (_, its) in others)])


def _one_slice(devices: Sequence[jax.Device], name: str | None) -> tuple[Topology, np.ndarray]:
    """The topology of one slice, and its devices ``[tasks, devices of a task]``."""
    if not all(hasattr(d, "coords") for d in devices):
        raise ValueError(f"{devices[0]!r} is not a TPU: it has no coordinates")
    ordered = devices_by_process(devices, "TPU devices")
    coordinates = np.array([[(*d.coords, d.core_on_chip) for d in row] for row in ordered])
    coordinates[..., :3] -= coordinates[..., :3].reshape(-1, 3).min(0)  # part of a larger slice has an offset
    mesh = coordinates.reshape(-1, 4).max(0) + 1
    kind = generation_of(devices[0].device_kind)
    x, y, z, _ = mesh.tolist()
    wrap = kind.wrap((x, y, z)) if kind else (False, False, False)
    if name is None and kind is not None:
        name = f"{kind.name}:{'x'.join(map(str, mesh[: kind.dims]))}"
    return Topology(mesh_shape=mesh, device_coordinates=coordinates, wrap=wrap, name=name), ordered


def _attached_devices(tpu: str | None) -> list[jax.Device]:
    if tpu not in (None, "", "local"):
        raise ValueError(
            f"TPUClusterResolver(tpu={tpu!r}): JAX drives the TPUs of the machines that it runs on, and connects to no "
            "others by name or address. Run this on the TPU VM, one process a host, with tpu=None."
        )
    return attached_devices(
        "tpu",
        "To run with none, emulate one: TPUClusterResolver(emulate='2x2x1x2'); to compile for one that is not there: "
        "TPUClusterResolver(topology='v5e:4x4'). On a TPU VM, install 'replicax[tpu]', and leave JAX_PLATFORMS unset.",
    )


def _absent(name: str, slices: int) -> list[jax.Device]:
    """The devices of so many TPU slices that need not exist: XLA compiles for them, but nothing runs."""
    kind, shape = parse_slice(name)
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise RuntimeError(
            f"the devices of {name!r} come from libtpu, which is not installed: pip install 'replicax[tpu]'. No TPU is "
            "needed. To run the step rather than compile it, emulate the slice: TPUClusterResolver(emulate=...)."
        )
    # Without the first three libtpu looks for its machine, and waits for it. It allows only one process at a time, to
    # protect a TPU that is not there, and leaves logs behind: both are useless here.
    alone = {
        "TPU_ACCELERATOR_TYPE": kind.accelerator_type(shape),
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "disabled",
    }
    # By default libtpu refuses a single chip, as it does not fill a host, ...
    options: dict[str, Any] = {"chips_per_host_bounds": [min(n, size) for n, size in zip(HOST, shape, strict=True)]}
    if kind.devices_per_chip < kind.cores_per_chip:
        options["chip_config_name"] = "megacore"  # ... and describes v4 as it was before megacore.
    if slices > 1:
        options["num_slices"] = slices
    with environment_defaults(alone):
        try:
            return list(topologies.get_topology_desc(name, platform="tpu", **options).devices)
        except Exception as error:
            what = f"TPU slice {name!r}" if slices == 1 else f"{slices} TPU slices {name!r}"
            raise ValueError(f"libtpu knows no {what}: {error}") from error


def _emulated_slice(slice_: str | Topology, slices: int) -> tuple[Topology, np.ndarray]:
    topology = slice_ if isinstance(slice_, Topology) else _parse_emulated(slice_)
    several, count = f"{slices} × " if slices > 1 else "", slices * topology.num_devices
    devices = emulated_devices(count, f"{several}{topology!r} takes {count} CPU devices")
    return topology, devices.reshape(slices * topology.num_tasks, topology.num_tpus_per_task)


def _parse_emulated(text: str) -> Topology:
    if not isinstance(text, str):
        raise ValueError(f"TPUClusterResolver: emulate must be a string such as '2x2x1x2', or a Topology, got {text!r}")
    if ":" in slice_name(text):
        return Topology.from_name(text)
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)", text)
    if match is None or "0" in match.groups():
        raise ValueError(
            f"TPUClusterResolver(emulate={text!r}): expected four positive numbers, chips along x, y and z and cores "
            "of a chip, as in '2x2x1x2'; or the name of a slice, such as 'v3:2x2'"
        )
    x, y, z, cores = (int(n) for n in match.groups())
    return Topology.of_chips((x, y, z), cores)
