"""Replicate a program whose operations are placed on logical devices: a plan of many programs instead of one."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from replicax import _jax
from replicax.devices.arrays import put
from replicax.devices.mesh import REPLICA_AXIS, logical_device_mesh
from replicax.errors import PlacementError
from replicax.execution.compiled.local_values import value_layout
from replicax.execution.compiled.replicate import (
    largest_split,
    over_replicas_of,
    policy_for,
    rewriting_for,
    target_for,
)
from replicax.execution.compiled.split_variables import evaluated
from replicax.execution.compiled.wanted_pieces import wanted_pieces
from replicax.execution.program.infer import infer, localities_of
from replicax.execution.program.program import Program
from replicax.locality import Locality, M, T
from replicax.padding.examples import where_examples_are
from replicax.pipeline.dispatch import Launch, LaunchPlan, PlacedExecutable, Send
from replicax.pipeline.flat_program import bytes_of, flatten
from replicax.pipeline.placement import place
from replicax.pipeline.regions import Region, cut, needed, program_of
from replicax.pipeline.schedule import schedule
from replicax.shared_devices.device_program import evaluated_on_device
from replicax.variables.initial_layout import move
from replicax.variables.layout import Layout, Split


def replicate_placed(program: Program, mesh: Mesh) -> PlacedExecutable:
    """Like :func:`replicax.execution.compiled.replicate.replicate`, for a program with a place for each operation.

    The variables that it uses move to their homes.
    """
    planner = _Planner(program, mesh)
    executable = planner.executable()
    for use in program.uses.values():
        variable = use.variable()
        home = planner.placement.home_of(use.slot)
        if variable is not None and variable.layout.logical_device != home:
            move(variable, home)
    return executable


class _Planner:
    """Makes the plan of one program."""

    def __init__(self, program: Program, mesh: Mesh) -> None:
        for use in program.uses.values():
            if any(use.layout.axes) or use.layout.home is not None:
                where = "split over the logical devices" if use.layout.home is None else f"on {use.layout.home}"
                raise PlacementError(
                    f"{use.describe()} is {where}, and can't be used by a step that assigns values to one logical "
                    "device each"
                )
        self.program, self.policy = program, policy_for(program, mesh.shape[REPLICA_AXIS])
        self.without_constants = dataclasses.replace(program, constants=[])  # the plan has them
        self.mesh = mesh
        self.several = program.replicas > 1
        self.per_device = program.replicas // int(mesh.shape[REPLICA_AXIS])
        count = mesh.size // mesh.shape[REPLICA_AXIS]
        for devices in mesh.devices.reshape(-1, count):
            if len({d.process_index for d in devices}) > 1:
                raise PlacementError(
                    f"a step can assign values to logical devices if one process has all of a replica's, but "
                    f"{list(devices)} belong to several: choose a device assignment that keeps them together"
                )
        self.meshes = [logical_device_mesh(mesh, k) for k in range(count)]
        self.flat = flatten(program, self.meshes[0])
        self.padded: tuple[bool, ...] | None = None
        self.example_dims: tuple[int | None, ...] = ()
        self.results = self._infer()
        self.placement = place(self.flat, program)
        self.slots: dict[Any, int] = {}
        self.layouts: dict[Any, Layout] = {
            v: use.layout for v, use in zip(self.flat.inputs, program.reads, strict=False)
        }
        self.layouts |= {
            v: value_layout(locality, program.replicas)
            for v, (_, locality) in zip(self.flat.inputs[len(program.reads) :], program.arguments, strict=False)
        }
        self.pieces = any(isinstance(u.layout, Split) for u in program.uses.values())
        if self.pieces:
            self.layouts = self._in_pieces() | self.layouts

    def _infer(self) -> list[Locality]:
        """The localities of the results, and in ``localities`` those of all values."""
        program = self.program
        inputs = program.input_localities
        outputs = infer(program.jaxpr, inputs, program.obligations, check=self.several)
        if program.example_dims is not None:
            self.padded, self.example_dims = where_examples_are(program, outputs)
        closed = [M] * (len(self.flat.inputs) - len(inputs))  # arrays that called programs have closed over
        self.localities = localities_of(self.flat.jaxpr(program.jaxpr), inputs + closed)
        return outputs[len(program.writes) :]

    def _in_pieces(self) -> dict[Any, Layout]:
        """The layouts between regions of values of which only pieces are needed, such as sums of gradients."""
        wanted = [use.layout if isinstance(use.layout, Split) else None for use in self.program.writes]
        hints = wanted_pieces(self.flat.jaxpr(self.program.jaxpr), wanted)
        made = {v for operation in self.flat.operations for v in operation.results}
        return {v: split for v, split in hints.items() if v in made and self.localities.get(v, M) is not T}

    # --- regions ------------------------------------------------------------------------------------------

    def _outputs(self) -> list[tuple[Any, int, Layout]]:
        """Each output of the program, the device on which it is wanted, and its layout there."""
        program, n_written = self.program, len(self.program.writes)
        found = []
        for i, atom in enumerate(self.flat.outputs):
            if i < n_written:
                use = program.writes[i]
                device, layout = self.placement.home_of(use.slot), use.layout
            else:
                device = (self.placement.places[atom].device if _is_value(atom) else None) or 0
                stacked = self.several or (self.padded is not None and self.padded[i - n_written])
                layout = value_layout(self.results[i - n_written] if stacked else M, program.replicas)
            found.append((self.placement.source(atom), device, layout))
        return found

    def executable(self) -> PlacedExecutable:
        """The executable of the program, with its plan."""
        outputs = self._outputs()
        regions = cut(self.flat, self.placement, [(v, k) for v, k, _ in outputs if _is_value(v)])
        maker = {v: region for region in regions for v in region.makes}
        # What is made on its device comes out of that region. Anything else (a constant, an argument, what was
        # sent there) goes through one more, so that it lies as it should, in an array of its own.
        through: dict[int, Region] = {}
        for i, (atom, device, _) in enumerate(outputs):
            region = maker.get(atom) if _is_value(atom) else None
            if region is None or region.device != device:
                region = through.setdefault(device, Region(device, [], {}, {}, 0.0))
                region.needs.update(dict.fromkeys(needed([atom], self.placement)))
            region.outputs.append(i)
        return self._plan(schedule([*regions, *through.values()]), outputs)

    # --- the plan -----------------------------------------------------------------------------------------

    def slot(self, key: Any, device: int) -> int:
        """The place of a value on a device while the step runs."""
        return self.slots.setdefault((key, device), len(self.slots))

    def layout(self, v: Any) -> Layout:
        if v in self.layouts:
            return self.layouts[v]
        return value_layout(self.localities.get(v, M) if self.several else M, self.program.replicas)

    def sharding(self, v: Any, device: int) -> NamedSharding:
        return NamedSharding(self.meshes[device], self.layout(v).spec)

    def stored(self, v: Any, device: int) -> jax.ShapeDtypeStruct:
        shape = self.layout(v).stored_shape(v.aval.shape)
        return jax.ShapeDtypeStruct(shape, v.aval.dtype, sharding=self.sharding(v, device))

    def _plan(self, regions: Sequence[Region], outputs: Sequence[tuple[Any, int, Layout]]) -> PlacedExecutable:
        program, flat = self.program, self.flat
        homes = {slot: self.placement.home_of(slot) for slot in program.uses}
        n_reads, n_written = len(program.reads), len(program.writes)
        variables = [(v, homes[use.slot]) for v, use in zip(flat.inputs, program.reads, strict=False)]
        used_on: dict[Any, list[int]] = collections.defaultdict(list)
        for region in regions:
            for v in region.needs:
                if region.device not in used_on[v]:
                    used_on[v].append(region.device)
        given = [
            (i, self.slot(v, k), self.sharding(v, k), jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype))
            for i, v in enumerate(flat.inputs[n_reads : n_reads + len(program.arguments)])
            for k in used_on[v]
        ]
        constants = {
            self.slot(v, k): put(value, self.sharding(v, k))
            for v, value in zip(flat.closed_over, flat.constants, strict=True)
            for k in used_on[v]
        }
        order = program.order
        donated, kept, written = order.donated, order.kept, order.written
        slots_of_reads = [[self.slot(*variables[i]) for i in group] for group in (donated, kept)]

        last_use = {self.slot(v, region.device): step for step, region in enumerate(regions) for v in region.needs}
        immortal = {*slots_of_reads[1], *constants, *(slot for _, slot, _, _ in given)}
        if not self.policy.donates:
            immortal.update(slots_of_reads[0])
        for slot in immortal & set(last_use):
            last_use[slot] = len(regions)
        launches = [self._launch(step, region, outputs, used_on, last_use) for step, region in enumerate(regions)]
        ends = [self.slot(_OUTPUT, i) for i in range(len(outputs))]
        plan = LaunchPlan(
            slots=len(self.slots),
            donated=slots_of_reads[0],
            kept=slots_of_reads[1],
            given=given,
            constants=constants,
            first=self._sends(variables, used_on),
            launches=launches,
            written=[ends[i] for i in written],
            results=ends[n_written:],
            signals=[slot for (v, _), slot in self.slots.items() if v is _SIGNAL],
        )
        return PlacedExecutable(
            program=self.without_constants,
            localities=tuple(T if locality is T else M for locality in self.results),
            call=plan.run,
            donated=tuple(program.reads[i].slot for i in donated),
            kept=tuple(program.reads[i].slot for i in kept),
            written=tuple(program.writes[i].slot for i in written),
            mesh=self.mesh,
            home_transfer=None,
            plan=plan,
            homes=homes,
            padded=self.padded,
            example_dims=self.example_dims,
            policy=self.policy,
        )

    def _sends(self, values: Sequence[tuple[Any, int]], used_on: Mapping[Any, Sequence[int]]) -> list[Send]:
        """The sends of ``values`` from their device to the others on which they are used."""
        sends: dict[tuple[int, int], list[Any]] = collections.defaultdict(list)
        for v, origin in values:
            for target in used_on[v]:
                if target != origin:
                    sends[origin, target].append(v)
        return [
            Send(
                origin,
                target,
                [(self.slot(v, origin), self.slot(v, target)) for v in vs],
                [self.sharding(v, target) for v in vs],
                [bytes_of(v.aval) for v in vs],
            )
            for (origin, target), vs in sends.items()
        ]

    def _launch(
        self,
        step: int,
        region: Region,
        outputs: Sequence[tuple[Any, int, Layout]],
        used_on: Mapping[Any, Sequence[int]],
        last_use: Mapping[int, int],
    ) -> Launch:
        device = region.device
        results = [v for v in region.makes if v in used_on]  # by other regions, or it would not be among their needs
        gives = [self.slot(v, device) for v in results] + [self.slot(_OUTPUT, i) for i in region.outputs]
        atoms = results + [outputs[i][0] for i in region.outputs]
        layouts = [self.layout(v) for v in results] + [outputs[i][2] for i in region.outputs]
        if not atoms:
            gives, atoms, layouts = [self.slot(_SIGNAL, step)], [_NUMBER], [value_layout(M, self.program.replicas)]

        # An operand that no later region needs gives its memory to a result that lies just as it does.
        ends_here = {v for v in region.needs if last_use[self.slot(v, device)] == step}
        to_fill = collections.Counter(_kind(atom, layout) for atom, layout in zip(atoms, layouts, strict=True))
        dying: list[Any] = []
        for v in region.needs:
            kind = _kind(v, self.layout(v))
            if v in ends_here and to_fill[kind] > 0:
                to_fill[kind] -= 1
                dying.append(v)
        operands = dying, [v for v in region.needs if v not in set(dying)]
        jaxpr = program_of(region, self.flat, self.placement, self.program.jaxpr, atoms)
        jaxpr = jaxpr.replace(invars=[*operands[0], *operands[1]])
        layouts_in = [self.layout(v) for v in operands[0]], [self.layout(v) for v in operands[1]]
        mesh, known, per_device, pieces = self.meshes[device], self.localities, self.per_device, self.pieces
        program = self.without_constants  # and not self, which the function below would keep alive

        def run(first: list[Any], second: list[Any]) -> tuple[list[Any]]:
            values, given = [*first, *second], [*layouts_in[0], *layouts_in[1]]
            if per_device == 1:
                return (evaluated(jaxpr, values, layouts, known if pieces else None),)
            return (evaluated_on_device(jaxpr, values, given, layouts, known, program, per_device, pieces),)

        name = f"{self.program.name}_on_{device}"
        target = target_for(mesh, self.per_device > 1, largest_split(self.program), in_order=False)
        rewriting = rewriting_for(jaxpr, mesh, target, self.policy.errors)
        sent_only = {self.slot(v, device) for v in results if device not in used_on[v]}
        return Launch(
            device=device,
            jitted=over_replicas_of(mesh, run, jaxpr, layouts_in, (layouts,), name, True, rewriting, target),
            takes=([self.slot(v, device) for v in operands[0]], [self.slot(v, device) for v in operands[1]]),
            gives=gives,
            avals=([self.stored(v, device) for v in operands[0]], [self.stored(v, device) for v in operands[1]]),
            operations=collections.Counter(e.primitive.name for e in jaxpr.eqns),
            calls_back=_jax.calls_back(jaxpr) or _jax.prints(jaxpr),
            sends=self._sends([(v, device) for v in results], used_on),
            free=[self.slot(v, device) for v in ends_here] + sorted(sent_only),
        )


_OUTPUT = object()
"""As a value it stands for an output of the program, whose number takes the place of the device."""

_SIGNAL = object()
"""As a value it stands for what a region returns that has no other result, which tells that it has succeeded."""

_NUMBER = _jax.Literal(np.int32(0), _jax.ShapedArray((), np.dtype(np.int32)))


def _kind(atom: Any, layout: Layout) -> Any:
    """Arrays of one kind can take each other's memory."""
    return (
        layout.stored_shape(np.shape(atom.val) if isinstance(atom, _jax.Literal) else atom.aval.shape),
        atom.aval.dtype,
        layout.spec,
    )


def _is_value(atom: Any) -> bool:
    return not isinstance(atom, _jax.Literal)
