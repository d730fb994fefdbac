"""Walk through a step's schedule: its time, its dearest kernels, and the collectives that are not hidden."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from replicax.hlo.collective_instructions import plain_name
from replicax.hlo.instructions import Instruction
from replicax.planning.timeline.user_lines import SourceLines
from replicax.planning.timeline.walk import KernelRun, Run, TransferRun

DEAREST = 10


@dataclasses.dataclass(frozen=True)
class DearKernel:
    """A kernel that takes much of a step.

    Attributes:
      name: the operation, in JAX's words.
      kind: one of those of :data:`replicax.planning.timeline.kernels.EFFICIENCY`.
      type: the type of its result.
      count: how often it runs in one step.
      seconds: the time of all of these together.
      flops: the flops of the matrix products of one.
      bytes: those that one reads and writes.
      bound_by: what takes longest: ``"compute"``, ``"memory"``, ``"host memory"``, ``"arithmetic"`` or ``"launch"``.
      where: the line of the user's program, if that is known.
    """

    name: str
    kind: str
    type: str
    count: int
    seconds: float
    flops: int
    bytes: int
    bound_by: str
    where: str


@dataclasses.dataclass(frozen=True)
class Exposed:
    """A collective that kernels wait for: it is not hidden, or not all of it.

    Attributes:
      kind: as in :class:`Collective`.
      bytes: the bytes of its result on one device.
      count: how often it is issued in one step.
      seconds: the time of all of these together.
      exposed: how many of these seconds kernels wait.
      why: what keeps it from being hidden, for most of that time.
      where: the line of the user's program, if that is known.
    """

    kind: str
    bytes: int
    count: int
    seconds: float
    exposed: float
    why: str
    where: str


_Row = TypeVar("_Row", DearKernel, Exposed)


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A prediction of one step, by its schedule.

    Attributes:
      seconds: its time.
      kernels: seconds in which kernels run.
      communication: seconds of all collectives, one after the other.
      exposed: seconds in which kernels wait for collectives.
      flops: the flops of matrix products.
      model_flops: the same, without what the backward pass computes a second time.
      utilization: the model's FLOPs as a share of what the chip computes in that time at its peak for the dtype (MFU).
      hardware_utilization: the same, of all FLOPs.
      by_kind: seconds of kernels, by their kind.
      dearest: the kernels that take most.
      waits: the collectives that kernels wait for, the longest wait first.
      copying: seconds in which kernels wait for copies that run beside them, such as to and from the host's memory.
      opaque: the targets of calls whose arithmetic is not known, such as cuSOLVER's: they are timed by their bytes.
    """

    seconds: float
    kernels: float
    communication: float
    exposed: float
    flops: int
    model_flops: int
    utilization: float
    hardware_utilization: float
    by_kind: dict[str, float]
    dearest: tuple[DearKernel, ...]
    waits: tuple[Exposed, ...]
    copying: float
    opaque: tuple[str, ...]

    @property
    def hidden(self) -> float:
        """The share of communication that runs beside kernels; 1 if there is none."""
        return max(0.0, 1.0 - self.exposed / self.communication) if self.communication else 1.0


def timeline_of(runs: Sequence[tuple[Run, SourceLines]]) -> Timeline:
    """The prediction of a step from its programs, which run one after the other."""
    kernels = [kernel for run, _ in runs for kernel in run.kernels.values()]
    transfers = [transfer for run, _ in runs for transfer in run.transfers.values()]
    seconds = sum(run.seconds for run, _ in runs)
    flops = sum(k.count * k.kernel.flops for k in kernels)
    model_flops = sum(k.count * k.kernel.model_flops for k in kernels)
    by_kind = collections.Counter[str]()
    for k in kernels:
        by_kind[k.kernel.kind] += k.count * k.kernel.seconds  # type: ignore[assignment]
    of_model = sum(k.count * k.kernel.at_peak * k.kernel.model_flops / (k.kernel.flops or 1) for k in kernels)
    at_peak = sum(k.count * k.kernel.at_peak for k in kernels)
    return Timeline(
        seconds=seconds,
        kernels=sum(k.count * k.kernel.seconds for k in kernels),
        communication=sum(t.count * t.each for t in transfers),
        exposed=sum(t.exposed for t in transfers),
        flops=flops,
        model_flops=model_flops,
        utilization=of_model / (seconds or 1.0),
        hardware_utilization=at_peak / (seconds or 1.0),
        by_kind=dict(by_kind.most_common()),
        dearest=tuple(_dearest((k, lines) for run, lines in runs for k in run.kernels.values())),
        waits=tuple(_exposed_collectives((t, lines) for run, lines in runs for t in run.transfers.values())),
        copying=sum(run.copying for run, _ in runs),
        opaque=tuple(dict.fromkeys(_target(k.instruction) for k in kernels if k.kernel.kind == "opaque")),
    )


def _target(call: Instruction) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', call.attributes)
    return found[1] if found else call.name


def _dearest(kernels: Iterable[tuple[KernelRun, SourceLines]]) -> list[DearKernel]:
    """Return the kernels that take most; alike ones, as of a loop and an iteration taken out of it, are one."""
    rows = []
    for run, lines in sorted(kernels, key=lambda item: -item[0].count * item[0].kernel.seconds)[: 8 * DEAREST]:
        kernel, instruction = run.kernel, run.instruction
        name = plain_name(instruction.op_name) or instruction.name
        type_ = ", ".join(map(str, instruction.arrays))
        amounts = (run.count, run.count * kernel.seconds, kernel.flops, kernel.bytes, kernel.bound_by)
        rows.append(DearKernel(name, kernel.kind, type_, *amounts, lines.of(instruction)))
    joined = _joined(rows, lambda row: (row.name, row.kind, row.type, row.flops, row.bytes), "count", "seconds")
    return sorted(joined, key=lambda row: -row.seconds)[:DEAREST]


def _exposed_collectives(transfers: Iterable[tuple[TransferRun, SourceLines]]) -> list[Exposed]:
    rows = []
    for run, lines in transfers:
        if run.exposed:
            amounts = (run.use.bytes, run.count, run.count * run.each, run.exposed)
            why = max(run.reasons, key=run.reasons.__getitem__)
            rows.append(Exposed(run.use.kind, *amounts, why, lines.of(run.instruction)))
    joined = _joined(rows, lambda row: (row.kind, row.bytes, row.why, row.where), "count", "seconds", "exposed")
    return sorted(joined, key=lambda row: -row.exposed)


def _joined(rows: Iterable[_Row], key: Callable[[_Row], object], *sums: str) -> list[_Row]:
    """Join rows with the same key to the first of them, with the sums of some fields."""
    found: dict[object, list[_Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return [
        dataclasses.replace(alike[0], **{name: sum(getattr(row, name) for row in alike) for name in sums})
        for alike in found.values()
    ]
