"""Dispatch: run the regions of a placed program, each on its device, and send values between them.

Each region is a program of its own, over the replicas' devices with its number. JAX hands programs and copies to the
devices and returns at once, so one thread keeps all of them busy, and each waits for nothing but its operands.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from replicax import _jax
from replicax.devices.arrays import put_among
from replicax.devices.mesh import REPLICA_AXIS, logical_device_mesh
from replicax.execution.compiled.replicate import Executable
from replicax.execution.tracing.arguments import Arguments
from replicax.hlo.collective_instructions import Collective, collectives_in
from replicax.pipeline.flat_program import bytes_of
from replicax.pipeline.placement_report import DeviceReport, PlacementReport, Transfer
from replicax.variables.initial_layout import checked_logical_device
from replicax.variables.slots import Slot


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Send:
    """Values of one logical device that are sent to another."""

    origin: int  # the logical device that has them
    target: int  # the one that gets them
    # The places of each on the origin and on the target. (A value on a device has its own place in a step.)
    pairs: list[tuple[int, int]]
    shardings: list[NamedSharding]  # the sharding of each on the target
    sizes: list[int]  # the bytes of each, of one replica


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One region in the plan."""

    device: int  # the logical device
    jitted: Any  # its program
    # The places of its operands: of those whose memory it may take, and of the others.
    takes: tuple[list[int], list[int]]
    gives: list[int]  # the places of its results
    avals: tuple[list[Any], list[Any]]  # of its operands
    operations: collections.Counter[str]  # how many of each kind it has
    calls_back: bool  # whether it calls Python functions on the host, or prints
    sends: list[Send]  # what is sent when it has been launched
    free: list[int]  # what is not needed any more then


@dataclasses.dataclass(slots=True, eq=False)
class LaunchPlan:
    """The launches of one run of a placed program, in order."""

    slots: int  # how many places there are for values
    donated: list[int]  # the places of the arrays of variables that are read and written
    kept: list[int]  # the places of those that are only read
    # For each place of each argument: the argument's number, the place, its sharding there, and its shape for one
    # replica.
    given: list[tuple[int, int, NamedSharding, jax.ShapeDtypeStruct]]
    constants: Mapping[int, jax.Array]  # arrays that are always there, by place
    first: list[Send]  # what is sent at the start
    launches: list[Launch]  # the regions
    written: list[int]  # the places of the new arrays of variables
    results: list[int]  # the places of the results
    # For each region that only calls back or prints, the place of an array that tells that it has succeeded.
    signals: list[int]
    _compiled: list[Any] | None = None
    _lock: Any = dataclasses.field(default_factory=threading.Lock)

    def compiled(self) -> list[jax.stages.Compiled]:
        """The compiled program of each launch; microbatches share theirs."""
        with self._lock:
            if self._compiled is None:
                self._compiled = self._compile()
            return self._compiled

    def lowered(self) -> Iterator[tuple[Any, jax.stages.Lowered]]:
        """The program of each launch, before it is compiled, with a key that launches of the same program share."""
        for number, launch in enumerate(self.launches):
            with _jax.enable_x64_for([*launch.avals[0], *launch.avals[1]]):
                lowered = launch.jitted.lower(*launch.avals)
            # The text of a program does not tell which Python function it calls back, nor what it prints.
            yield (launch.device, lowered.as_text(), number if launch.calls_back else None), lowered

    def _compile(self) -> list[jax.stages.Compiled]:
        known: dict[Any, concurrent.futures.Future[jax.stages.Compiled]] = {}
        programs = []
        with concurrent.futures.ThreadPoolExecutor() as pool:  # XLA compiles outside Python's lock
            for key, lowered in self.lowered():
                if key not in known:
                    known[key] = pool.submit(lowered.compile)
                programs.append(known[key])
            return [program.result() for program in programs]

    def run(
        self, donated: Sequence[jax.Array], kept: Sequence[jax.Array], arguments: Sequence[Any], constants: Any
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Launch everything; see :class:`replicax.execution.compiled.replicate.Executable`."""
        programs = self.compiled()
        values: list[Any] = [None] * self.slots
        for slot, array in self.constants.items():
            values[slot] = array
        for slots, arrays in ((self.donated, donated), (self.kept, kept)):
            for slot, array in zip(slots, arrays, strict=True):
                values[slot] = array
        for (_, slot, _, _), array in zip(self.given, arguments, strict=True):
            values[slot] = array
        for send in self.first:
            _send(send, values)
        for launch, program in zip(self.launches, programs, strict=True):
            dying, living = launch.takes
            [results] = program([values[i] for i in dying], [values[i] for i in living])
            for slot, array in zip(launch.gives, results, strict=True):
                values[slot] = array
            for send in launch.sends:
                _send(send, values)
            for slot in launch.free:
                values[slot] = None
        jax.block_until_ready([values[i] for i in self.signals])
        return [values[i] for i in self.written], [values[i] for i in self.results]


def _send(send: Send, values: list[Any]) -> None:
    arrays = [values[origin] for origin, _ in send.pairs]
    for (_, target), array in zip(send.pairs, moved(arrays, send.shardings), strict=True):
        values[target] = array


def moved(arrays: Sequence[jax.Array], shardings: Sequence[NamedSharding]) -> list[jax.Array]:
    """Each array on the devices of its sharding, which has a device for each of the array's, in their order."""
    if all(a.is_fully_addressable for a in arrays):
        found: list[jax.Array] = jax.device_put(list(arrays), list(shardings))
        return found
    # Of several processes each sends what it has: a replica's logical devices belong to one process.
    results: list[jax.Array] = []
    for array, sharding in zip(arrays, shardings, strict=True):
        present = array.sharding
        assert isinstance(present, NamedSharding)
        target = dict(zip(present.mesh.devices.flat, sharding.mesh.devices.flat, strict=True))
        rows = [jax.device_put(s.data, target[s.device]) for s in array.addressable_shards]
        results.append(jax.make_array_from_single_device_arrays(array.shape, sharding, rows))
    return results


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class PlacedExecutable(Executable):
    """A program whose operations are placed on logical devices: a program for each region."""

    plan: LaunchPlan  # the regions, in the order in which they are launched
    homes: Mapping[Slot, int]  # the logical devices of its variables

    @property
    def loops(self) -> bool:
        return False

    def ready(self) -> Any:
        self.plan.compiled()
        return self.call

    def placed(self, arguments: Arguments) -> list[Any]:
        arrays = arguments.arrays
        return [
            put_among(arrays[i] if isinstance(arrays[i], jax.Array) else np.asarray(arrays[i], aval.dtype), sharding)
            for i, _, sharding, aval in self.plan.given
        ]

    def compiled(self, options: dict[str, Any] | None = None) -> jax.stages.Compiled:
        raise TypeError(f"{self.program.name} is not one program: see plan.compiled() for each of its regions")

    def compiled_text(self, logical_device: int | None = None) -> str:
        """The optimised HLO of the regions in the order of launch; those of ``logical_device`` if it is given."""
        if logical_device is not None:
            count = self.mesh.devices[0].size
            logical_device = checked_logical_device(logical_device, count, f"the program of {self.program.name!r}")
        texts = []
        for launch, program in zip(self.plan.launches, self.plan.compiled(), strict=True):
            if logical_device in (None, launch.device):
                texts.append(f"// logical device {launch.device}\n{program.as_text() or ''}")
        return "\n".join(texts)

    def collectives(self, logical_device: int | None = None) -> list[Collective]:
        """The collectives that one run issues; those of ``logical_device`` if it is given."""
        return collectives_in(self.compiled_text(logical_device))

    def placement(self) -> PlacementReport:
        """The place of each operation and byte, from the compiled programs."""
        uses = self.program.uses
        reports = []
        per_device = self.program.replicas // self.mesh.devices.shape[0]
        programs = self.plan.compiled()
        for k in range(self.mesh.devices[0].size):
            launches = [(lau, p) for lau, p in zip(self.plan.launches, programs, strict=True) if lau.device == k]
            operations: collections.Counter[str] = collections.Counter()
            for launch, _ in launches:
                operations.update(launch.operations)
            memory: list[Any] = [p.memory_analysis() for _, p in launches]
            variables = [u for slot, u in uses.items() if self.homes[slot] == k]
            reports.append(
                DeviceReport(
                    logical_device=k,
                    regions=len(launches),
                    operations=operations,
                    variables=len(variables),
                    variable_bytes=sum(_stored_bytes(u, self.mesh.devices.shape[0]) for u in variables),
                    argument_bytes=sum(
                        bytes_of(aval) * (per_device if REPLICA_AXIS in s.spec else 1)
                        for _, _, s, aval in self.plan.given
                        if s.mesh == logical_device_mesh(self.mesh, k)
                    ),
                    temporary_bytes=max((m.temp_size_in_bytes for m in memory), default=0),
                )
            )
        sends = [*self.plan.first, *(s for launch in self.plan.launches for s in launch.sends)]
        transfers: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
        for send in sends:
            transfers[send.origin, send.target] += send.sizes
        return PlacementReport(
            self.program.name,
            tuple(reports),
            tuple(Transfer(a, b, len(s), sum(s)) for (a, b), s in sorted(transfers.items())),
        )


def _stored_bytes(use: Any, replicas: int) -> int:
    whole = bytes_of(use.aval.update(shape=use.layout.stored_shape(use.aval.shape)))
    return whole if use.layout.spec == jax.sharding.PartitionSpec() else whole // replicas
