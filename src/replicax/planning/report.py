"""``Plan``: what a step needs, as data."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replicax.argument_checks import checked_path
from replicax.hlo.collective_instructions import CollectiveUse
from replicax.planning.chip_specs import Chip
from replicax.planning.cost import Cost
from replicax.planning.estimate import Estimate, ScalingPoint
from replicax.planning.memory import Memory
from replicax.planning.timeline.prediction import Timeline
from replicax.system.packages import PICTURES, check_installed
from replicax.system.quantities import bytes_in_words, counted

if TYPE_CHECKING:
    import rich.console

VERSION = 2
"""Of the JSON: it grows when a field changes its meaning."""


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """A collective of the step.

    Attributes:
      kind: as in :class:`Collective`.
      bytes: the bytes of its result on one device.
      axes: the axes of the mesh along which its participants lie; of what slices tell each other, ``"slice"``, and
        the others' axes as well if a program is for all slices, and several devices of each take part.
      participants: how many devices take part together.
      count: how often it is issued in one step.
      where: in the traced program, in JAX's words.
      seconds: the estimate for one issue; ``None`` without a chip.
      way: between GPUs what it goes over: ``"NVLink"``, ``"PCIe"``, ``"network"``, or ``"NVLink, network"``.
    """

    kind: str
    bytes: int
    axes: tuple[str, ...]
    participants: int
    count: int
    where: str
    seconds: float | None
    way: str = ""

    @classmethod
    def of(cls, use: CollectiveUse, seconds: float | None, way: str = "") -> CollectiveRow:
        """The row of a collective, with its estimate."""
        return cls(use.kind, use.bytes, use.axes, use.participants, use.count, use.where, seconds, way)


@dataclasses.dataclass(frozen=True)
class Stage:
    """One logical device's part of a pipeline, the programs that ``assign_to_logical_device`` makes of a step.

    Attributes:
      logical_device: its number.
      programs: how many different ones it runs; microbatches share theirs.
      memory: as in :class:`Plan`, when the regions run in the order in which they are launched.
      cost: the cost of all that it runs in one step.
      collectives: between the replicas; and what it sends to other logical devices, of the kind ``"send"``.
      estimate: the estimate of its work, without what it waits for; ``None`` without a chip.
      timeline: that of its programs, one after the other; it does not wait for other stages. ``None`` without a chip.
    """

    logical_device: int
    programs: int
    memory: Memory
    cost: Cost
    collectives: tuple[CollectiveRow, ...]
    estimate: Estimate | None
    timeline: Timeline | None

    @property
    def busy(self) -> float:
        """A measure to compare stages: seconds, or operations where the time is not known."""
        if self.timeline is None:
            return self.cost.matrix_flops + self.cost.other_flops
        return self.timeline.seconds


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The memory, work and time of a step on its devices; :func:`replicax.plan` makes it.

    Everything is for one device (a JAX device: a TPU core, or a chip whose cores act as one) and one step. Memory is
    what the compiler has laid out; FLOPs, bytes and collectives are counted in the compiled program, a loop as often as
    it runs; seconds are predictions, by formula, and no measurement: bounds by :mod:`replicax.planning.estimate`, and
    a walk through the compiled schedule by ``replicax.planning.timeline``. In a
    pipeline devices differ: then the memory is that of the stage that needs most, the rest that of the stage that is
    busy longest, and ``stages`` has them all.

    Attributes:
      step: the name of the step's function.
      strategy: the kind of the strategy.
      platform: ``"tpu"``, ``"cpu"`` or ``"gpu"``.
      device_kind: what the devices say that they are.
      devices: how many there are.
      replicas: how many replicas share them.
      mesh: the axes of the mesh, and their sizes.
      is_absent: whether the devices are only described.
      topology: the chips of a slice along x, y and z, such as ``"8x8x8"``; of GPUs the domains that NVLink
        joins (hosts, as a rule), and the GPUs of each, ``"16x8"``. Empty if they are not known.
      slices: how many slices there are.
      fits: whether the memory suffices; ``None`` if its size is not known.
      memory: see :class:`replicax.planning.memory.Memory`.
      cost: see :class:`replicax.planning.cost.Cost`.
      collectives: see :class:`replicax.planning.report.CollectiveRow`.
      estimate: see :class:`replicax.planning.estimate.Estimate`; ``None`` without a chip.
      timeline: see ``replicax.planning.timeline.prediction.Timeline``; ``None`` without a chip.
      examples: of a step, on all replicas together; ``None`` if the arrays that it takes don't agree in dim 0.
      tokens: the tokens of an example: the size of dim 1 of its integers ``[examples, tokens]``; ``None`` without any.
      scaling: predictions from one replica to all; empty without a chip, and if replicas share devices.
      stages: see :class:`replicax.planning.report.Stage`; empty if the step is one program for all devices.
      chip: the figures that estimates are made from.
      trace_seconds: how long it took to trace the step.
      compile_seconds: how long it took to compile it.
      words: if the step does not fit, what the compiler says.

    >>> import replicax
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> found = replicax.plan(strategy, lambda: replicax.get_replica_context().all_reduce("sum", 1.0))
    >>> found.replicas, found.mesh, found.to_dict()["collectives"][0]["kind"]
    (2, {'replica': 2}, 'all-reduce')
    >>> found
    <Plan of <lambda> on 2 replicas, 2 × cpu: needs ... on each device, whose memory is unknown>
    """

    step: str
    strategy: str
    platform: str
    device_kind: str
    devices: int
    replicas: int
    mesh: dict[str, int]
    is_absent: bool
    fits: bool | None
    memory: Memory
    cost: Cost
    chip: Chip | None
    trace_seconds: float
    compile_seconds: float
    words: str
    topology: str
    slices: int
    collectives: tuple[CollectiveRow, ...]
    estimate: Estimate | None
    timeline: Timeline | None
    examples: int | None = None
    tokens: int | None = None
    scaling: tuple[ScalingPoint, ...] = ()
    stages: tuple[Stage, ...] = ()

    @property
    def title(self) -> str:
        """The plan in a line."""
        slices = f"{self.slices:,} slices of " if self.slices > 1 else ""
        devices = f"{self.devices:,} × {self.device_kind}" + (f" ({slices}{self.topology})" if self.topology else "")
        return f"{self.step} on {counted(self.replicas, 'replica')}, {devices}"

    @property
    def verdict(self) -> str:
        """A line that says whether the step fits."""
        needed = f"{bytes_in_words(self.memory.total)} on each device"
        if self.memory.capacity is None:
            return f"needs {needed}, whose memory is unknown"
        answer = "fits" if self.fits else "does not fit"
        return f"{answer}: needs {needed}, of {bytes_in_words(self.memory.capacity)}"

    @property
    def examples_per_second(self) -> float | None:
        """The predicted speed of all replicas; ``None`` without a chip, or if the number of examples is not known."""
        if self.timeline is None or self.examples is None or not self.timeline.seconds:
            return None
        return self.examples / self.timeline.seconds

    @property
    def tokens_per_second(self) -> float | None:
        """The predicted speed of all replicas; ``None`` if ``examples_per_second`` or ``tokens`` is."""
        each = self.examples_per_second
        return None if each is None or self.tokens is None else each * self.tokens

    def to_dict(self) -> dict[str, Any]:
        """The plan as dicts, lists, strings and numbers."""
        found = {"version": VERSION, **dataclasses.asdict(self)}
        found |= {"examples_per_second": self.examples_per_second, "tokens_per_second": self.tokens_per_second}
        parts: list[tuple[Plan | Stage, dict[str, Any]]] = [(self, found)]
        for part, data in (*parts, *zip(self.stages, found["stages"], strict=True)):
            data["memory"]["total"] = part.memory.total
            if part.estimate is not None:
                data["estimate"] |= {"at_least": part.estimate.at_least, "bound_by": part.estimate.bound_by}
            if part.timeline is not None:
                data["timeline"]["hidden"] = part.timeline.hidden
        return found

    def to_json(self) -> str:
        """The plan as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def write_html(self, path: str | Path) -> None:
        """Write the plan as one page with its pictures, which needs nothing from outside.

        Raises:
          ImportError: Matplotlib, which draws them, is not installed.
        """
        from replicax.planning.render.page import page

        check_installed("Plan.write_html", *PICTURES)
        Path(checked_path(path, "Plan.write_html(path)")).write_text(page(self), encoding="utf-8")

    def print(self, console: rich.console.Console | None = None) -> None:
        """Print the plan as tables."""
        import rich.console

        from replicax.planning.render.tables import print_plan

        print_plan(self, console or rich.console.Console(highlight=False))

    def __str__(self) -> str:
        return f"{self.title}: {self.verdict}"

    def __repr__(self) -> str:
        return f"<Plan of {self}>"

    def _repr_html_(self) -> str:
        """The tables, for a notebook."""
        from replicax.planning.render.page import fragment

        return fragment(self)
