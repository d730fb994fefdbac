"""The picture of a placement: a column for each device, a row for each variable, a track for each exchange.

In the row of a variable each device has the outline of the whole value, with its part filled. Equal parts have the same
colour: so a mirrored variable has one colour, and a variable that is split over all devices has as many as there are
pieces.
"""

from __future__ import annotations

import colorsys
import itertools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from replicax.argument_checks import checked_path
from replicax.devices.mesh import programs_for
from replicax.drawing.holdings import (
    Column,
    DevicePart,
    Exchange,
    Holding,
    columns_of,
    devices_that_hold,
    exchanges_in,
    holding_of,
)
from replicax.drawing.svg import Drawing, cut_to, lines_of, width_of
from replicax.execution.compiled.replicate import Executable
from replicax.pipeline.dispatch import PlacedExecutable
from replicax.system.quantities import bytes_in_words, counted
from replicax.tpu.core_owners import COLOURS
from replicax.variables.partitioners import GroupPartitioner, Partitioner

if TYPE_CHECKING:
    from replicax.variables.variable import Variable
    from replicax.workers.replicas import Replicas

Kind = TypeVar("Kind")

_MARGIN, _LABELS = 22.0, 236.0
_MOST_DEVICES, _MOST_VARIABLES = 16, 12
_LANE, _GAP = 13.0, 3.0


def plot(
    path: str | os.PathLike[str],
    replicas: Replicas,
    partitioner: Partitioner | None,
    variables: Sequence[Variable],
    program: Executable | None,
) -> None:
    """Draw a placement into a file; see :meth:`replicax.StrategyExtended.plot`."""
    file = Path(checked_path(path, "extended.plot(path)"))
    if file.suffix.lower() != ".svg":
        raise ValueError(f"plot: the path must end in .svg, got {str(path)!r}")
    file.write_text(picture_of(replicas, partitioner, variables, program))


def picture_of(
    replicas: Replicas,
    partitioner: Partitioner | None,
    variables: Sequence[Variable],
    program: Executable | None = None,
) -> str:
    """The text of an SVG with a placement; see :meth:`replicax.StrategyExtended.plot`."""
    if not isinstance(program, Executable | None):
        raise TypeError(f"extended.plot: program must be what extended.trace(step, args) returns, got {program!r}")
    if isinstance(program, PlacedExecutable):
        raise ValueError(
            "plot: this step assigns values to logical devices, and so is several programs: leave program out, and see "
            "its placement()"
        )
    devices = devices_that_hold(replicas.mesh, variables)
    groups = 1
    if isinstance(partitioner, GroupPartitioner):
        groups = replicas.device_count // partitioner.size(replicas.device_count, replicas.slices)
    return placement_picture(
        type(replicas.strategy).__name__,
        _facts(replicas, groups),
        columns_of(replicas, devices, groups),
        [holding_of(v, devices, replicas.per_device) for v in variables],
        None
        if program is None
        else exchanges_in(program.compiled_text(), replicas.mesh.size, programs_for(replicas.mesh.devices)),
    )


def placement_picture(
    title: str,
    facts: str,
    columns: Sequence[Column],
    holdings: Sequence[Holding],
    exchanges: Sequence[Exchange] | None,
) -> str:
    """The text of an SVG that shows what each device holds and, if a step is given, what it exchanges."""
    page = _Page(columns)
    page.head(title, facts, len(columns))
    top = page.y
    page.devices()
    for holding in sorted(sorted(holdings, key=lambda h: -h.bytes)[:_MOST_VARIABLES], key=holdings.index):
        page.variable(holding)
    page.kept(holdings)
    page.panels(top)
    if exchanges is not None:
        page.exchanges(exchanges)
    page.legend(holdings)
    return page.document(title)


class _Page:
    """Shapes are added below ``y``, which then moves down. Panels are drawn last, beneath everything else."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.shown = columns[:_MOST_DEVICES]
        self.column = 88.0 if len(self.shown) <= 8 else 60.0
        self.left = _MARGIN + _LABELS
        self.width = max(self.left + self.column * len(self.shown) + _MARGIN, 640.0)
        self.y = _MARGIN
        self.below, self.above = Drawing(), Drawing()
        self.room = self.column - 18

    def middle(self, device: int) -> float:
        return self.left + (device + 0.5) * self.column

    def runs(self, of: Callable[[Column], Kind]) -> list[tuple[Kind, int, int]]:
        """Runs of neighbouring columns that are alike in ``of``: it, the first column, and the one after the last."""
        runs = itertools.groupby(range(len(self.shown)), key=lambda i: of(self.shown[i]))
        alike = [(what, list(columns)) for what, columns in runs]
        return [(what, columns[0], columns[-1] + 1) for what, columns in alike]

    def head(self, title: str, facts: str, devices: int) -> None:
        self.above.text(_MARGIN, self.y + 14, title, 17, "ink b")
        self.y += 24
        more = f"; the first {_MOST_DEVICES} devices of {devices}" if devices > len(self.shown) else ""
        for line in lines_of(facts + more, 12, self.width - 2 * _MARGIN):
            self.above.text(_MARGIN, self.y + 12, line, 12, "muted")
            self.y += 17
        self.y += 12

    # --- the devices ------------------------------------------------------------------------------------

    def devices(self) -> None:
        if any(c.panel for c in self.shown):
            for panel, first, end in self.runs(lambda c: c.panel):
                room = (end - first) * self.column
                self.above.text(self._between(first, end), self.y + 17, cut_to(panel, 12, room), 12, "ink b", "middle")
            self.y += 22
        else:
            self.y += 6
        if any(c.group for c in self.shown):
            for group, first, end in self.runs(lambda c: c.group):
                left, right = self.left + first * self.column + 8, self.left + end * self.column - 8
                bracket = [(left, self.y + 22), (left, self.y + 17), (right, self.y + 17), (right, self.y + 22)]
                self.above.line(bracket, "link", 1.2)
                self.above.text(self._between(first, end), self.y + 13, group, 11, "muted", "middle")
            self.y += 26
        runs = self.runs(lambda c: c.replicas)
        size, spelt = self._replica_words(runs)
        for replicas, first, end in runs:
            left, width = self.left + first * self.column + 6, (end - first) * self.column - 12
            self.above.box(left, self.y + 2, width, 21, "bar", 5)
            self.above.text(
                self._between(first, end), self.y + 16.5, _replicas(replicas, spelt), size, "ink b", "middle"
            )
        self.y += 27
        for i, column in enumerate(self.shown):
            self.above.text(self.middle(i), self.y + 12, cut_to(column.name, 11, self.column), 11, "ink", "middle")
            if column.logical_device is not None:
                words = f"logical {column.logical_device}"
                self.above.text(self.middle(i), self.y + 25, words, 10, "muted", "middle")
        self.y += 34 if any(c.logical_device is not None for c in self.shown) else 21

    def _replica_words(self, runs: Sequence[tuple[tuple[int, ...], int, int]]) -> tuple[float, bool]:
        """The size of the text for each device's replicas, and whether there is room for more than numbers."""
        for size in (11.0, 10.0, 9.0):
            if all(
                width_of(_replicas(replicas, True), size, bold=True) <= (end - first) * self.column - 14
                for replicas, first, end in runs
            ):
                return size, True
        return 10.0, False

    def _between(self, first: int, end: int) -> float:
        return self.left + (first + end) / 2 * self.column

    def panels(self, top: float) -> None:
        for _, first, end in self.runs(lambda c: c.panel):
            width = (end - first) * self.column - 4
            self.below.box(self.left + first * self.column + 2, top, width, self.y - top, "panel", 8)

    # --- contents ---------------------------------------------------------------------------------------

    def variable(self, holding: Holding) -> None:
        self._rule()
        words = [(cut_to(holding.name, 13, _LABELS - 12, bold=True), 13.0, "ink b")]
        size = f"{holding.kind} · {_size(holding.bytes)}"
        words += [(line, 11.0, "muted") for line in lines_of(size, 11, _LABELS - 12)]
        words += [(line, 11.0, "muted") for line in lines_of(holding.where, 11, _LABELS - 12)]
        rows, columns = holding.shown_dims()
        width, height = self._outline(holding, rows, columns)
        colours = _colours_of(holding)
        tall = max(height + 34, 15 * len(words) + 16)
        foot = self.y + (tall - height - 16) / 2
        for i, part in enumerate(holding.parts[: len(self.shown)]):
            if part is None:
                self.above.text(self.middle(i), foot + height / 2 + 4, "–", 12, "muted", "middle")
                continue
            many = min(part.copies, 4)
            each = (width - _GAP * (many - 1)) / many
            for copy in range(many):
                left = self.middle(i) - width / 2 + copy * (each + _GAP)
                self._value(holding, part, (left, foot, each, height), (rows, columns), colours[i, copy])
            said = holding.share(part)
            self.above.text(self.middle(i), foot + height + 14, said, 10, "muted", "middle")
        self._labels(words, tall)

    def _outline(self, holding: Holding, rows: int | None, columns: int | None) -> tuple[float, float]:
        """The size of a value in the picture: flatter than its shape, so that all shapes fit."""
        if columns is None:
            return 14.0 * min(4, max((p.copies for p in holding.parts if p), default=1)), 14.0
        if rows is None:
            return self.room, 14.0
        steep = math.sqrt(max(holding.shape[rows], 1) / max(holding.shape[columns], 1))
        height = self.room * min(max(steep, 0.35), 1.5)
        scale = min(1.0, 62 / height)
        return self.room * scale, height * scale

    def _value(
        self,
        holding: Holding,
        part: DevicePart,
        place: tuple[float, float, float, float],
        dims: tuple[int | None, int | None],
        colour: str,
    ) -> None:
        """The outline of a value, with a device's part."""
        left, top, width, height = place
        self.above.box(left, top, width, height, "rest", 2)
        spans = []
        for dim in dims:
            start, end = (0, 1) if dim is None else part.bounds[dim]
            size = 1 if dim is None else max(holding.shape[dim], 1)
            spans.append((start / size, end / size))
        (up, down), (begin, stop) = spans
        if part.size:
            self.above.box(
                left + begin * width, top + up * height, (stop - begin) * width, (down - up) * height, colour, 2
            )

    def _labels(self, words: list[tuple[str, float, str]], tall: float) -> None:
        at = self.y + (tall - 15 * len(words)) / 2 + 11
        for text, size, kind in words:
            self.above.text(_MARGIN, at, text, size, kind)
            at += 15
        self.y += tall

    def _rule(self) -> None:
        self.above.line([(_MARGIN, self.y), (self.left + self.column * len(self.shown), self.y)], "line", 0.8)

    def kept(self, holdings: Sequence[Holding]) -> None:
        """The memory of the variables on each device, compared with that of all variables."""
        self._rule()
        total = max(sum(h.bytes for h in holdings), 1)
        words = [("kept on each device", 13.0, "ink b")]
        count = counted(len(holdings), "variable")
        more = f", the {_MOST_VARIABLES} largest drawn" if len(holdings) > _MOST_VARIABLES else ""
        words += [(line, 11.0, "muted") for line in lines_of(f"{count} of {_size(total)}{more}", 11, _LABELS)]
        for i in range(len(self.shown)):
            held = sum(part.bytes for h in holdings if (part := h.parts[i]) is not None)
            left, width = self.middle(i) - self.room / 2, self.room
            self.above.text(self.middle(i), self.y + 20, _size(held), 11, "ink b", "middle")
            self.above.box(left, self.y + 27, width, 7, "rest", 3)
            if held:
                self.above.box(left, self.y + 27, max(width * min(held / total, 1), 3), 7, "full", 3)
        self._labels(words, 48)

    # --- communication ----------------------------------------------------------------------------------

    def exchanges(self, exchanges: Sequence[Exchange]) -> None:
        self.y += 26
        self.above.text(_MARGIN, self.y, "Collectives of a step", 13, "ink b")
        if not exchanges:
            self.above.text(self.left + 8, self.y, "none", 12, "muted")
        self.y += 12
        for exchange in exchanges:
            lanes = _lanes([sorted(g) for g in exchange.groups if min(g) < len(self.shown)])
            tall = max(38.0, _LANE * len(lanes) + 20)
            self._rule()
            top = self.y + (tall - _LANE * (len(lanes) - 1)) / 2
            for number, lane in enumerate(lanes):
                for group in lane:
                    self._group(group, top + number * _LANE)
            size = _size(exchange.bytes)
            size = f"{exchange.count:,}, together {size}" if exchange.count > 1 else size
            self._labels([(exchange.kind, 12.0, "ink b"), (size, 11.0, "muted")], tall)

    def _group(self, group: Sequence[int], at: float) -> None:
        """The devices of a group, on a line that leaves the page if there are more of them."""
        inside = [i for i in group if i < len(self.shown)]
        right = self.left + self.column * len(self.shown) if len(inside) < len(group) else self.middle(inside[-1])
        self.above.line([(self.middle(inside[0]), at), (right, at)], "link", 2)
        for i in inside:
            self.above.dot(self.middle(i), at, 4.5, "dot")

    def legend(self, holdings: Sequence[Holding]) -> None:
        words = "Filled: what the device has of the value. In a row, the same colour is the same numbers."
        if any(p.copies > 4 for h in holdings for p in h.parts if p):
            words += " Of values that each replica has for itself, the first four of a device."
        self.y += 10
        for line in lines_of(words, 11, self.width - 2 * _MARGIN):
            self.above.text(_MARGIN, self.y + 12, line, 11, "muted")
            self.y += 16
        self.y += 14

    def document(self, title: str) -> str:
        return self.below.under(self.above).document(self.width, self.y, title)


def _facts(replicas: Replicas, groups: int) -> str:
    """A description of a placement."""
    logical = replicas.logical_devices.shape[1]
    facts = [
        counted(replicas.num_replicas, "replica")
        + (f" of {logical} devices each" if logical > 1 else "")
        + (f", {replicas.per_device} on each device" if replicas.per_device > 1 else ""),
        counted(groups, "group") if groups > 1 else "",
        counted(replicas.slices, "slice") if replicas.slices > 1 else "",
        counted(replicas.lockstep.workers.count, "worker") if replicas.lockstep.several else "",
        counted(replicas.mesh.size, "device"),
    ]
    return "  ·  ".join(fact for fact in facts if fact)


def _replicas(numbers: tuple[int, ...], spelt: bool) -> str:
    """The replicas of a device."""
    if not numbers:
        return "no replica" if spelt else "–"
    if len(numbers) == 1:
        return f"replica {numbers[0]}" if spelt else f"{numbers[0]}"
    return f"{'replicas ' if spelt else ''}{numbers[0]}–{numbers[-1]}"


def _colours_of(holding: Holding) -> dict[tuple[int, int], str]:
    """The colour of each device and copy: one for each different content."""
    contents: dict[tuple[object, int], int] = {}
    numbers = {
        (i, copy): contents.setdefault((part.bounds, part.first + copy), len(contents))
        for i, part in enumerate(holding.parts)
        if part is not None
        for copy in range(part.copies)
    }
    many = len(contents) > len(COLOURS)
    return {at: _hue(n, len(contents)) if many else COLOURS[n] for at, n in numbers.items()}


def _hue(number: int, count: int) -> str:
    """Return one of ``count`` colours of the rainbow."""
    red, green, blue = colorsys.hls_to_rgb(number / count, 0.5 if number % 2 else 0.38, 0.55)
    return f"#{round(255 * red):02X}{round(255 * green):02X}{round(255 * blue):02X}"


def _size(size: float) -> str:
    return bytes_in_words(size).replace(".00 ", " ")


def _lanes(groups: Sequence[list[int]]) -> list[list[list[int]]]:
    """Groups side by side if they don't overlap, and otherwise below each other."""
    lanes: list[list[list[int]]] = []
    for group in sorted(groups):
        lane = next((lane for lane in lanes if lane[-1][-1] < group[0]), None)
        if lane is None:
            lanes.append([group])
        else:
            lane.append(group)
    return lanes
