"""A strategy as a few values: those of its choices that a plan varies without the program's help."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

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


@dataclasses.dataclass(frozen=True)
class StrategySpec:
    """Which devices, how variables lie on them, what a replica is spread over, and how many replicas a device has.

    Attributes:
      topology: of a TPU slice, such as ``"v5p:4x4x4"``, or of GPUs, such as ``"h100:16x8"``; ``None`` for emulated CPU
        devices.
      slices: how many slices, if there are several.
      devices: how many CPU devices to emulate; 8 if it is not said.
      variables: ``"mirrored"``; ``"sharded"``: a piece on each replica; or ``"groups:N"``: each group of N neighbouring
        replicas has a copy in pieces.
      logical: the cores of one replica, along x, y, z and on a chip; or their number, for a block as close to a cube as
        there is. Of GPUs and of emulated devices it is their number that counts.
      microbatches: how many replicas share a device, or a replica's devices, and run one after the other.

    Raises:
      ValueError: ``variables`` means nothing.

    >>> from replicax.planning.strategy_spec import StrategySpec
    >>> StrategySpec(devices=8, variables="groups:4", logical=2).variables
    'groups:4'
    """

    topology: str | None = None
    slices: int | None = None
    devices: int | None = None
    variables: str = "mirrored"
    logical: Shape | int | None = None
    microbatches: int = 1

    def __post_init__(self) -> None:
        check_variables(self.variables)

    def strategy(self) -> Strategy:
        """The strategy.

        Raises:
          RuntimeError: there is no libtpu, or no compiler for GPUs; or JAX has made other devices already.
          ValueError: there is no such slice or GPU, the devices can't be divided like this, or what is asked for does
            not go together.
        """
        if self.topology is None:
            use_cpu_devices(self.devices or 8)
            return self._replicated(None, self.devices or 8)
        if is_gpu_topology(self.topology):
            if self.slices is not None:
                raise ValueError(f"slices are of TPUs; the hosts of GPUs are part of the topology, as in {_HOSTS!r}")
            devices = GPUClusterResolver(topology=self.topology).devices
            return self._replicated(devices, devices.size)
        resolver = TPUClusterResolver(topology=self.topology, slices=self.slices)
        cores = self.logical
        if isinstance(cores, int):
            cores = block_of(cores, resolver.topology.mesh_shape.tolist())
        if cores is None:
            assignment = DeviceAssignment.one_core_each(resolver.topology)
        else:
            assignment = DeviceAssignment.build(resolver.topology, cores, num_replicas=None)
        blocks = assignment.num_replicas * resolver.slices
        return TPUStrategy(resolver, assignment, self._partitioner(blocks), self._replicas(blocks))

    def _replicated(self, devices: np.ndarray | None, count: int) -> Strategy:
        """On so many devices; ``None``: those of this process."""
        cores = self.logical or 1
        parts = cores if isinstance(cores, int) else math.prod(cores)
        blocks = max(1, count // parts)
        return MirroredStrategy(
            devices,
            variable_partitioner=self._partitioner(blocks),
            num_replicas=self._replicas(blocks),
            num_logical_devices=parts,
        )

    def _replicas(self, blocks: int) -> int | None:
        return None if self.microbatches == 1 else blocks * self.microbatches

    def _partitioner(self, blocks: int) -> Partitioner | None:
        if self.variables == "mirrored":
            return None
        if self.variables == "sharded":
            return over_all(blocks)
        return GroupPartitioner(int(self.variables.partition(":")[2]))


def devices_and_slices(topology: str, slices: int | None = None) -> tuple[int, int]:
    """How many devices there are, and in how many slices they lie (of GPUs: domains that NVLink joins).

    Raises:
      ValueError: there is no such slice or GPU.

    >>> from replicax.planning.strategy_spec import devices_and_slices
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
    """``text``, if it says how variables lie.

    Raises:
      ValueError: it does not.
    """
    if not re.fullmatch(r"mirrored|sharded|groups:[1-9]\d*", str(text)):
        raise ValueError(f"must be mirrored, sharded or groups:N, such as groups:8, got {text!r}")
    return text


def block_of(cores: int, mesh: Sequence[int]) -> Shape:
    """A block of so many cores, as close to a cube as there is, in a mesh; the cores of a chip come first.

    Raises:
      ValueError: no block of so many cores divides the mesh.

    >>> from replicax.planning.strategy_spec import block_of
    >>> block_of(4, (4, 4, 4, 1)), block_of(4, (8, 8, 1, 2)), block_of(8, (4, 4, 4, 1))
    ((2, 2, 1, 1), (2, 1, 1, 2), (2, 2, 2, 1))
    """
    block = [1] * len(mesh)
    for prime in _primes(cores):
        room = [d for d, size in enumerate(mesh) if size % (block[d] * prime) == 0]
        if not room:
            break
        chosen = len(mesh) - 1 if len(mesh) - 1 in room else min(room, key=lambda d: (block[d], d))
        block[chosen] *= prime
    if math.prod(block) != cores:
        mesh_in_words = "x".join(map(str, mesh))
        raise ValueError(f"no block of {cores} cores divides {mesh_in_words} cores along x, y, z and on a chip")
    return tuple(block)


def _primes(number: int) -> list[int]:
    """The prime factors of a number, the largest first."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors[::-1]
