"""A compiled step as it runs: kernels one after the other, and collectives beside them.

The text of a program is its schedule: the instructions of a computation run in the order in which they stand. A device
has a stream of kernels and one of communication. A collective whose start and end are two instructions runs on the
second, after those that were started before it, and the first goes on; at its end the kernels wait for what is left of
it, which is not hidden. For a collective that is one instruction they wait at once. Copies between kinds of memory have
a stream of their own.

A loop runs as often as the program says. Its first iteration may find the communication stream busy with what was
started before; the second stands for all others. Of a branch the arm counts that takes longest.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

from replicax.hlo.collective_instructions import CollectiveUse, ProgramDevices, uses_in
from replicax.hlo.executed import parts_of, trip_count
from replicax.hlo.instructions import Computation, Instruction, Module
from replicax.planning.chip_specs import Chip
from replicax.planning.cost import is_launched
from replicax.planning.timeline.kernels import Kernel, kernel_of

NOT_ASYNCHRONOUS = "it is one instruction, which everything waits for"
NOTHING_BESIDE = "no kernel stands between its start and its end"
TOO_SHORT = "the kernels between its start and its end are shorter"
QUEUED = "it starts only when the collectives before it have ended"

INTERFERENCE = 0.08
"""How much longer kernels of a GPU take while a collective, which is a kernel, too, runs beside them."""


@dataclasses.dataclass
class KernelRun:
    """A kernel, as often as it runs."""

    instruction: Instruction
    kernel: Kernel
    count: int = 0


@dataclasses.dataclass
class TransferRun:
    """A collective, as often as it is issued; ``each`` is the seconds of one.

    Kernels wait for its end for the ``exposed`` seconds of a step, of which ``reasons`` has the parts, by reason.
    """

    instruction: Instruction
    use: CollectiveUse
    each: float
    count: int = 0
    exposed: float = 0.0
    reasons: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Run:
    """One step, as it runs on one device."""

    seconds: float = 0.0  # its time
    kernels: dict[str, KernelRun] = dataclasses.field(default_factory=dict)  # by the name of their instruction
    # By the name of the instruction that starts them.
    transfers: dict[str, TransferRun] = dataclasses.field(default_factory=dict)
    copying: float = 0.0  # the seconds in which kernels wait for copies that run beside them


@dataclasses.dataclass
class _Started:
    """An operation that runs on a stream beside the kernels."""

    issued: float
    begun: float
    end: float
    kernels_before: float
    transfer: str  # by its name in the run; empty for a copy


class ScheduleWalk:
    """Walks through the schedule of a program."""

    def __init__(self, module: Module, chip: Chip, devices: ProgramDevices) -> None:
        self.module = module
        self._chip = chip
        self._kernels: dict[str, Kernel] = {}
        self._uses = uses_in(module, devices)
        # The factor by which a collective that runs slows down a kernel.
        self.slowdown = 1.0 + (INTERFERENCE if chip.multiprocessors else 0.0)

    def run(self, seconds_of: Callable[[CollectiveUse], float]) -> Run:
        """Walk through one step, with the time that one issue of a collective takes."""
        return _Clock(self, seconds_of).run_all()

    # What instructions are, which does not depend on how long collectives take.

    def kernel(self, computation: Computation, instruction: Instruction) -> Kernel:
        if instruction.name not in self._kernels:
            self._kernels[instruction.name] = kernel_of(self.module, computation, instruction, self._chip)
        return self._kernels[instruction.name]

    def uses(self, computation: Computation, instruction: Instruction) -> list[tuple[Instruction, CollectiveUse]]:
        """The collectives that an instruction is, starts, or has inside, each with its own instruction."""
        parts = [part for _, part in parts_of(self.module, computation, instruction)]
        return [(part, self._uses[part.name]) for part in parts if part.name in self._uses]


class _Clock:
    """One walk: three streams, and what has run on them."""

    def __init__(self, walk: ScheduleWalk, seconds_of: Callable[[CollectiveUse], float]) -> None:
        self._walk = walk
        self._seconds_of = seconds_of
        self._found = Run()
        self._now = 0.0
        self._busy_until = 0.0  # the communication stream
        self._copying_until = 0.0
        self._in_kernels = 0.0

    def run_all(self) -> Run:
        self._computation(self._walk.module.entry, 1)
        self._found.seconds = max(self._now, self._busy_until)
        return self._found

    def _computation(self, name: str, times: int) -> None:
        computation = self._walk.module.computations[name]
        started: dict[str, _Started] = {}
        for instruction in computation.instructions.values():
            self._instruction(computation, instruction, times, started)

    def _instruction(
        self, computation: Computation, instruction: Instruction, times: int, started: dict[str, _Started]
    ) -> None:
        opcode = instruction.opcode
        match opcode:
            case "while":
                self._loop(computation, instruction, times)
                return
            case "conditional":
                self._branch(instruction, times)
                return
            case "call":
                for name in instruction.called("to_apply", "calls"):
                    self._computation(name, times)
                return
        if opcode.endswith("-done"):
            self._finish(instruction, times, started)
            return
        is_start = opcode.endswith("-start") or opcode in ("send", "recv")
        if not is_start and not is_launched(instruction):
            return
        uses = self._walk.uses(computation, instruction)
        for part, use in uses:
            started[instruction.name] = self._start(instruction.name, part, use, times)
        if is_start:
            if not uses:
                started[instruction.name] = self._copy(computation, instruction)
            return
        if not uses or opcode == "fusion":
            self._kernel(computation, instruction, times)
        if uses:
            is_fused = opcode == "fusion"  # which runs beside the collective that it has inside
            self._wait(started.pop(instruction.name), times, TOO_SHORT if is_fused else NOT_ASYNCHRONOUS)

    # --- kernels

    def _kernel(self, computation: Computation, instruction: Instruction, times: int) -> None:
        kernel = self._walk.kernel(computation, instruction)
        run = self._found.kernels.setdefault(instruction.name, KernelRun(instruction, kernel))
        run.count += times
        beside, slowdown = max(0.0, self._busy_until - self._now), self._walk.slowdown
        seconds = kernel.seconds * slowdown
        if seconds > beside:
            seconds = beside + (kernel.seconds - beside / slowdown)
        self._now += seconds
        self._in_kernels += seconds

    # --- what runs beside them

    def _start(self, name: str, instruction: Instruction, use: CollectiveUse, times: int) -> _Started:
        each = self._seconds_of(use)
        transfer = self._found.transfers.setdefault(name, TransferRun(instruction, use, each))
        transfer.count += times
        begun = max(self._now, self._busy_until)
        self._busy_until = begun + each
        return _Started(self._now, begun, begun + each, self._in_kernels, name)

    def _copy(self, computation: Computation, instruction: Instruction) -> _Started:
        begun = max(self._now, self._copying_until)
        self._copying_until = begun + self._walk.kernel(computation, instruction).seconds
        return _Started(self._now, begun, self._copying_until, self._in_kernels, "")

    def _finish(self, instruction: Instruction, times: int, started: dict[str, _Started]) -> None:
        for name in instruction.operands:
            if (running := started.pop(name, None)) is not None:
                self._wait(running, times)

    def _wait(self, running: _Started, times: int, reason: str = "") -> None:
        waited = max(0.0, running.end - self._now)
        self._now = max(self._now, running.end)
        if not running.transfer:
            self._found.copying += times * waited
        elif waited:
            if not reason and self._in_kernels == running.kernels_before:
                reason = NOTHING_BESIDE
            elif not reason:
                reason = QUEUED if running.begun - running.issued >= waited else TOO_SHORT
            transfer = self._found.transfers[running.transfer]
            transfer.exposed += times * waited
            transfer.reasons[reason] = transfer.reasons.get(reason, 0.0) + times * waited

    # --- loops and branches

    def _loop(self, computation: Computation, loop: Instruction, times: int) -> None:
        trips, bodies = trip_count(self._walk.module, computation, loop), loop.called("body")
        trips = 1 if trips is None else trips
        for repeated in (min(1, trips), trips - 1):  # the first may still find a collective from before the loop
            if repeated <= 0:
                continue
            begun, busy = self._now, self._busy_until
            for name in bodies:
                self._computation(name, times * repeated)
            more = (repeated - 1) * (self._now - begun)
            self._now += more
            self._busy_until += more if self._busy_until != busy else 0.0

    def _branch(self, instruction: Instruction, times: int) -> None:
        arms = []
        for name in instruction.called("branch_computations", "true_computation", "false_computation"):
            arm = copy.copy(self)
            arm._found = _copy_of(self._found)
            arm._computation(name, times)
            arms.append(arm)
        vars(self).update(vars(max(arms, key=lambda arm: arm._now)))  # go on after the one that takes longest


def _copy_of(run: Run) -> Run:
    return dataclasses.replace(
        run,
        kernels={name: dataclasses.replace(k) for name, k in run.kernels.items()},
        transfers={name: dataclasses.replace(t, reasons=dict(t.reasons)) for name, t in run.transfers.items()},
    )
