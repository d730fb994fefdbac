"""Makes a strategy from a few values: the options of ``replicax plan`` that say what is where."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from replicax.devices.mesh import logical_axes
from replicax.devices.selection import use_cpu_devices
from replicax.gpu.gpu_models import is_gpu_topology, parse_cluster
from replicax.gpu.gpu_resolver import GPUClusterResolver
from replicax.strategies.mirrored import MirroredStrategy
from replicax.strategies.tpu import TPUStrategy
from replicax.strategy import Strategy
from replicax.tpu.assignment import DeviceAssignment
from replicax.tpu.generations import parse_slice
from replicax.tpu.resolver import TPUClusterResolver
from replicax.variables.partitioners import GroupPartitioner, Partitioner, over_all

Shape = tuple[int, ...]
_HOSTS = "h100:16x8"


def strategy_of(
    *,
    topology: str | None = None,
    slices: int | None = None,
    devices: int | None = None,
    variables: str = "mirrored",
    logical: Shape | int | None = None,
    microbatches: int = 1,
) -> Strategy:
    """The strategy for these devices, with variables that lie on them like this.

    Args:
      topology: a TPU slice, such as ``"v5p:4x4x4"``, or GPUs, such as ``"h100:16x8"``; ``None`` for emulated CPU
        devices.
      slices: how many slices, if there are several.
      devices: how many CPU devices to emulate; by default 8.
      variables: ``"mirrored"``; ``"sharded"``: a piece on each replica; or ``"groups:N"``: each group of N neighbouring
        replicas has a copy in pieces.
      logical: the cores of one replica, along x, y, z and on a chip; or their number, for a block as close to a cube as
        there is. Of GPUs and of emulated devices it is their number that counts.
      microbatches: how many replicas share a device, or a replica's devices, and run one after the other.

    Raises:
      RuntimeError: there is no libtpu, or no compiler for GPUs; or JAX has made other devices already.
      ValueError: there is no such slice or GPU, the devices can't be divided like this, ``variables`` is none of these,
        or the arguments contradict each other.

    >>> strategy_of(devices=8, variables="groups:4", logical=2).num_replicas_in_sync
    4
    """
    check_variables(variables)
    if topology is not None and not is_gpu_topology(topology):
        resolver = TPUClusterResolver(topology=topology, slices=slices)
        if logical is None:
            assignment = DeviceAssignment.one_core_each(resolver.topology)
        else:
            block = block_of(logical, resolver.topology.mesh_shape.tolist()) if isinstance(logical, int) else logical
            assignment = DeviceAssignment.build(resolver.topology, block, num_replicas=None)
        blocks = assignment.num_replicas * resolver.slices
        return TPUStrategy(resolver, assignment, _partitioner(variables, blocks), _replicas(blocks, microbatches))
    if topology is None:
        count, found = devices or 8, None  # those of this process
        use_cpu_devices(count)
    else:
        if slices is not None:
            raise ValueError(f"slices are of TPUs; the hosts of GPUs are part of the topology, as in {_HOSTS!r}")
        found = GPUClusterResolver(topology=topology).devices
        count = found.size
    parts = math.prod(logical) if isinstance(logical, tuple) else logical or 1
    blocks = max(1, count // parts)
    return MirroredStrategy(
        found,
        variable_partitioner=_partitioner(variables, blocks),
        num_replicas=_replicas(blocks, microbatches),
        num_logical_devices=parts,
    )


def _replicas(blocks: int, microbatches: int) -> int | None:
    return None if microbatches == 1 else blocks * microbatches


def _partitioner(variables: str, blocks: int) -> Partitioner | None:
    if variables == "mirrored":
        return None
    if variables == "sharded":
        return over_all(blocks)
    return GroupPartitioner(int(variables.partition(":")[2]))


def devices_and_slices(topology: str, slices: int | None = None) -> tuple[int, int]:
    """Return the numbers of devices and of their slices (of GPUs: domains that NVLink joins).

    >>> devices_and_slices("h100:16x8"), devices_and_slices("v5e:4x4", slices=2)
    ((128, 16), (32, 2))
    """
    if is_gpu_topology(topology):
        model, hosts, gpus = parse_cluster(topology)
        return hosts * gpus, -(-hosts // model.hosts_per_domain)
    kind, shape = parse_slice(topology)
    count = slices or 1
    return math.prod(shape) * kind.devices_per_chip * count, count


def check_variables(text: str) -> str:
    """``text``, if it says how variables lie."""
    if not re.fullmatch(r"mirrored|sharded|groups:[1-9]\d*", str(text)):
        raise ValueError(f"must be mirrored, sharded or groups:N, such as groups:8, got {text!r}")
    return text


def block_of(cores: int, mesh: Sequence[int]) -> Shape:
    """A block of so many cores, as close to a cube as there is, in a mesh; the cores of a chip come first.

    >>> block_of(4, (4, 4, 4, 1)), block_of(4, (8, 8, 1, 2)), block_of(8, (4, 4, 4, 1))
    ((2, 2, 1, 1), (2, 1, 1, 2), (2, 2, 2, 1))
    """
    block = [1] * len(mesh)
    for prime in reversed(logical_axes(cores).values()):  # its prime factors, the largest first
        room = [d for d, size in enumerate(mesh) if size % (block[d] * prime) == 0]
        if not room:
            break
        chosen = len(mesh) - 1 if len(mesh) - 1 in room else min(room, key=lambda d: (block[d], d))
        block[chosen] *= prime
    if math.prod(block) != cores:
        mesh_in_words = "x".join(map(str, mesh))
        raise ValueError(f"no block of {cores} cores divides {mesh_in_words} cores along x, y, z and on a chip")
    return tuple(block)
