"""The memory, work and collectives of each logical device of a pipeline, over all programs that it runs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from replicax.devices.mesh import REPLICA_AXIS, axis_sizes, logical_device_mesh, programs_for
from replicax.hlo.collective_instructions import CollectiveUse, ProgramDevices, axes_of, collectives_of
from replicax.hlo.instructions import Module
from replicax.pipeline.dispatch import PlacedExecutable, Send
from replicax.planning.compilation import Compilation, compile_ahead, refusal
from replicax.planning.cost import Cost, cost_of
from replicax.planning.memory import (
    Buffer,
    Memory,
    buffer_of,
    bytes_on_device,
    compiled_buffers,
    memory_of,
    read_variables,
)


@dataclasses.dataclass(frozen=True)
class DeviceLoad:
    """One device's part of a step."""

    memory: Memory  # its memory, with all buffers
    cost: Cost  # the cost of what it computes
    collectives: list[CollectiveUse]  # those it takes part in, and what it sends to other logical devices
    # The programs that it runs, in their order, and where their devices lie.
    schedule: list[tuple[Module, ProgramDevices]]
    programs: int = 1  # the number of different programs


def compile_regions(executable: PlacedExecutable) -> list[Compilation]:
    """The program of each launch, compiled ahead of time; those that are the same only once."""
    name, device = executable.program.name, executable.mesh.devices.flat[0]
    known: dict[object, Compilation] = {}
    found = []
    try:
        programs = list(executable.plan.lowered())
    except Exception as error:  # whatever is raised for an operation that the devices don't have
        raise refusal(name, device.device_kind, error) from error
    for key, lowered in programs:
        if key not in known:
            known[key] = compile_ahead(lambda lowered=lowered: lowered, name, device)  # type: ignore[misc]
        found.append(known[key])
    return found


def loads_of(
    executable: PlacedExecutable, names: Sequence[str], programs: Sequence[Compilation], slices: int
) -> list[DeviceLoad]:
    """Return each logical device's part of a pipeline."""
    memories = _Memories(executable, names, programs).found()
    replicas = int(executable.mesh.shape[REPLICA_AXIS])
    width = executable.mesh.size // replicas
    loads = []
    for k, memory in enumerate(memories):
        mine = [p for launch, p in zip(executable.plan.launches, programs, strict=True) if launch.device == k]
        cost = cost_of(*(p.module for p in mine))
        placement = ProgramDevices(
            {REPLICA_AXIS: replicas},
            slices,
            programs_for(executable.mesh.devices),
            tuple(range(k, executable.mesh.size, width)),
        )
        collectives = _collectives(executable, k, mine, placement)
        schedule = [(p.module, placement) for p in mine]
        loads.append(DeviceLoad(memory, cost, collectives, schedule, len(set(mine))))
    return loads


def _collectives(
    executable: PlacedExecutable, k: int, programs: Sequence[Compilation], placement: ProgramDevices
) -> list[CollectiveUse]:
    """Return the collectives of a logical device's programs, and what it sends."""
    axes = axis_sizes(executable.mesh)
    found = collections.Counter[CollectiveUse]()
    for program in programs:
        for use in collectives_of(program.module, placement):
            found[dataclasses.replace(use, count=1)] += use.count
    sends = (*executable.plan.first, *(send for launch in executable.plan.launches for send in launch.sends))
    for send in (s for s in sends if s.origin == k):
        ends = (k, send.target)
        for size in send.sizes:
            where = f"to logical device {send.target}"
            found[CollectiveUse("send", size, axes_of(ends, axes), (ends,), 1, where)] += 1
    return [dataclasses.replace(use, count=count) for use, count in found.items()]


class _Memories:
    """Plays a pipeline through, in the order of its launches, and adds up what lies on each logical device."""

    def __init__(self, executable: PlacedExecutable, names: Sequence[str], programs: Sequence[Compilation]) -> None:
        self.executable = executable
        self.programs = programs
        replicas = executable.mesh.shape[REPLICA_AXIS]
        self.devices = range(executable.mesh.size // replicas)
        self.sizes: dict[int, int] = {}
        """Of what is kept in each place, on one device."""
        self.at: dict[int, int] = {}
        """The logical device of each place."""
        self.buffers: dict[int, list[Buffer]] = {k: [] for k in self.devices}
        self._lay_out(names)
        self.before = self._present(self.sizes)
        self.live = collections.Counter(self.before)
        self.peak = collections.Counter(self.before)

    def _add(self, place: int, k: int, buffer: Buffer) -> None:
        self.sizes[place], self.at[place] = buffer.bytes, k
        self.buffers[k].append(buffer)

    def _lay_out(self, names: Sequence[str]) -> None:
        """Lay out what is there before the step."""
        executable, plan = self.executable, self.executable.plan
        places, slots = (*plan.donated, *plan.kept), (*executable.donated, *executable.kept)
        for place, slot, buffer in zip(places, slots, read_variables(executable), strict=True):
            self._add(place, executable.homes[slot], buffer)
        number: dict[object, int] = {logical_device_mesh(executable.mesh, k): k for k in self.devices}
        for i, place, sharding, aval in plan.given:
            name = names[i] if i < len(names) else "padding"
            self._add(place, number[sharding.mesh], buffer_of("argument", name, aval))
        for place, array in plan.constants.items():
            assert isinstance(array.sharding, NamedSharding)
            self._add(place, number[array.sharding.mesh], buffer_of("constant", "closed over", array))

    def found(self) -> list[Memory]:
        """Return the memory of each logical device."""
        plan = self.executable.plan
        results_by_place: dict[int, Any] = {}
        for send in plan.first:
            self._send(send)
        for launch, program in zip(plan.launches, self.programs, strict=True):
            k = launch.device
            inside = memory_of(program.allocations, 0, ())
            self._note_peak(k, inside.outputs - inside.aliased + inside.temporaries)
            [results] = launch.jitted.eval_shape(*launch.avals)
            for place, array in zip(launch.gives, results, strict=True):
                results_by_place[place] = array
                self.sizes[place], self.at[place] = bytes_on_device(array), k
                self.live[k] += self.sizes[place]
            for send in launch.sends:
                self._send(send)
            for place in launch.free:
                self.live[k] -= self.sizes[place]
        self._name_outputs(results_by_place)
        updated = self._present(plan.donated)
        left = self._present([*plan.written, *plan.results])
        code, host = collections.Counter[int](), collections.Counter[int]()
        temporaries: dict[int, list[Buffer]] = {k: [] for k in self.devices}
        devices = {program: launch.device for launch, program in zip(plan.launches, self.programs, strict=True)}
        for program, k in devices.items():
            code[k] += program.code
            host[k] = max(host[k], program.host)
            temporaries[k] += compiled_buffers(program.allocations, program.module)
        return [
            Memory(
                arguments=self.before[k],
                outputs=left[k],
                aliased=updated[k],
                temporaries=max(0, self.peak[k] - self.before[k] - left[k] + updated[k]),
                code=code[k],
                host=host[k],
                buffers=(*self.buffers[k], *temporaries[k]),
            )
            for k in self.devices
        ]

    def _name_outputs(self, arrays: Mapping[int, Any]) -> None:
        """Name what is there after the step, and was not before."""
        executable, plan = self.executable, self.executable.plan
        names = {use.slot: use.name for use in executable.program.writes}
        first = len(executable.donated)
        for place, slot in zip(plan.written[first:], executable.written[first:], strict=True):
            self.buffers[self.at[place]].append(buffer_of("variable", names[slot], arrays[place]))
        for place in plan.results:
            self.buffers[self.at[place]].append(buffer_of("output", "returned", arrays[place]))

    def _present(self, places: Iterable[int]) -> collections.Counter[int]:
        found = collections.Counter[int]()
        for place in places:
            found[self.at[place]] += self.sizes[place]
        return found

    def _note_peak(self, k: int, more: int = 0) -> None:
        self.peak[k] = max(self.peak[k], self.live[k] + more)

    def _send(self, send: Send) -> None:
        for (origin, target), size in zip(send.pairs, send.sizes, strict=True):
            self.sizes[target], self.at[target] = self.sizes.get(origin, size), send.target
            self.live[send.target] += self.sizes[target]
            self._note_peak(send.target)
