"""Draws a slice into a file: PNG or SVG.

It uses a separate figure, not ``pyplot``'s: it changes no global state, and needs no display.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import BoxStyle
from matplotlib.path import Path as Outline

from replicax.argument_checks import checked_path
from replicax.system.quantities import counted
from replicax.tpu.assignment import DeviceAssignment
from replicax.tpu.core_owners import COLOURS, INK, LINE, MUTED, PAPER, SHARED, CoreOwners, core_owners
from replicax.tpu.topology import Topology

_WIDTH, _HEIGHT = 12.0, 8.0  # the room for the chips, in inches
_MARGIN, _HEAD, _NUMBERS = 0.45, 1.0, 0.24
_LARGEST = 1.1  # inches from chip to chip
_GAP = 2.0  # between planes, in chips
_CHIP, _SHEET, _STUB = 0.72, 0.46, 0.72  # the side of a chip; from its middle to the rim, and to an open end
_AROUND, _RIM, _EDGE = "#B98900", "#F4F6F9", "#9AA3B0"
_DPI = 160


def plot(topology: Topology, path: str | os.PathLike[str], assignment: DeviceAssignment | None = None) -> None:
    """Draw a slice: planes of chips side by side, links, hosts; with an assignment, replicas and logical devices."""
    path = checked_path(path, "plot(path)")
    if Path(path).suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"plot: the path must end in .png or .svg, got {path!r}")
    page = _Page(core_owners(topology, assignment))
    page.hosts()
    page.links(assignment)
    page.cores()
    page.numbers()
    page.text(_MARGIN, 0.42, _title(topology), 14, fontweight="bold")
    page.text(_MARGIN, 0.7, _facts(topology, assignment), 9.5, color=MUTED)
    page.legend(assignment)
    # Words stay words in an SVG, and the same picture gives the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "replicax"}):
        page.figure.savefig(path, dpi=_DPI, metadata={"Date": None} if path.lower().endswith("svg") else None)


class _Page:
    """A slice on paper. Positions are in chips, from the upper left one of the first plane; y goes down."""

    def __init__(self, picture: CoreOwners) -> None:
        self.picture = picture
        x, y, z = picture.topology.torus.shape
        # The number of planes side by side that makes the chips largest.
        self.across = max(range(1, z + 1), key=lambda n: (min(*self._units(n), _LARGEST), -n))
        self.unit = min(*self._units(self.across), _LARGEST)
        planes = z > 1
        self.numbered = self.unit > 0.27
        self.labelled = False
        left, top = _MARGIN + _NUMBERS * self.numbered, _HEAD + _NUMBERS * (self.numbered + planes)
        self.reach = _STUB if any(picture.topology.torus.wrap[:2]) else _SHEET
        right, bottom = self.at(np.array([[x - 1, y - 1, plane] for plane in range(z)])).max(0) + 2 * self.reach
        self.width = max(left + self.unit * right + _MARGIN, 7.0)
        self.height = top + self.unit * bottom + 0.85
        self.figure = Figure(figsize=(self.width, self.height), facecolor=PAPER)
        self.corner = -self.reach - np.array([left, top]) / self.unit
        low, high = self.corner, self.corner + np.array([self.width, self.height]) / self.unit
        self.axes = self.figure.add_axes((0, 0, 1, 1), xlim=(low[0], high[0]), ylim=(high[1], low[1]))
        self.axes.axis("off")

    def _units(self, across: int) -> tuple[float, float]:
        """The largest distance from chip to chip with so many planes side by side, in inches."""
        x, y, z = self.picture.topology.torus.shape
        return _WIDTH / (across * (x + _GAP)), _HEIGHT / (-(-z // across) * (y + _GAP))

    def at(self, chips: np.ndarray) -> np.ndarray:
        """The positions of chips ``[..., 3]`` on the page: ``[..., 2]``."""
        x, y, _ = self.picture.topology.torus.shape
        row, column = np.divmod(chips[..., 2], self.across)
        return np.stack([chips[..., 0] + column * (x + _GAP), chips[..., 1] + row * (y + _GAP)], axis=-1).astype(float)

    # --- shapes, from the lowest ------------------------------------------------------------------------

    def hosts(self) -> None:
        """A sheet under the chips of each host."""
        topology = self.picture.topology
        if topology.num_tasks == 1:
            return
        sheets = []
        for own in topology.device_coordinates:
            for z in np.unique(own[:, 2]):
                places = self.at(own[own[:, 2] == z][:, :3])
                sheets.append(self._box(places.min(0) - _SHEET, places.max(0) + _SHEET, 0.16))
        self._boxes(sheets, 0, facecolors=_RIM, edgecolors="#DDE2EA", linewidths=self._thin(0.8))

    def links(self, assignment: DeviceAssignment | None) -> None:
        """Links between chips; those from one logical device to the next in the colour of their replica."""
        ends = self.picture.topology.torus.links()
        there = np.asarray((self.picture.owner > -2).any(-1))[tuple(np.moveaxis(ends, -1, 0))].all(1)
        flat = ends[there & (ends[:, 0, 2] == ends[:, 1, 2])]  # the page has no room for links along z
        ring = _ring_links(assignment)
        lines: list[np.ndarray] = []
        colours: list[str] = []
        widths: list[float] = []
        for a, b in flat:
            wraps = bool(np.abs(a - b).max() > 1)
            owner = ring.get(frozenset((tuple(a.tolist()), tuple(b.tolist()))))
            strokes = self._stubs(a, b) if wraps else [self.at(np.stack([a, b]))]
            colour = (_AROUND if wraps else LINE) if owner is None else COLOURS[self.picture.colours[owner]]
            lines += strokes
            colours += [colour] * len(strokes)
            widths += [self._thin(1.8 if owner is None else 6.0)] * len(strokes)
        self.axes.add_collection(LineCollection(lines, capstyle="butt", zorder=1, colors=colours, linewidths=widths))

    def _stubs(self, a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
        """Draw a wrap-around link, which leaves on one side and comes back on the other, as two short ends."""
        last, first = self.at(np.stack([a, b]))
        out = (last - first) / np.abs(last - first).max() * _STUB
        return [np.stack([last, last + out]), np.stack([first, first - out])]

    def cores(self) -> None:
        """The chips, and their cores."""
        shape = self.picture.owner.shape
        chips, cores, colours, edges = [], [], [], []
        for chip in np.ndindex(shape[:3]):
            centre = self.at(np.array(chip))
            chips.append(self._box(centre - _CHIP / 2, centre + _CHIP / 2, 0.12))
            for core in range(shape[3]):
                at = (*chip, core)
                low, high = self._core(centre, core, shape[3])
                cores.append(self._box(low, high, 0.08))
                missing = self.picture.owner[at] == -2
                colours.append(PAPER if missing else self.picture.colour(at))
                edges.append(LINE if missing else "none")
                self._label(at, (low + high) / 2, high - low)
        self._boxes(chips, 2, facecolors=PAPER, edgecolors=_EDGE, linewidths=self._thin(1.0))
        self._boxes(cores, 3, facecolors=colours, edgecolors=edges, linewidths=self._thin(0.8))

    def _core(self, centre: np.ndarray, core: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The corners of a core: the cores of a chip are side by side."""
        inside, between = _CHIP - 0.08, 0.04
        side = (inside - between * (count - 1)) / count
        low = centre - inside / 2 + np.array([core * (side + between), 0])
        return low, low + np.array([side, inside])

    def _label(self, at: tuple[int, ...], centre: np.ndarray, size: np.ndarray) -> None:
        """The number of the replica, and below it that of the logical device if there is room."""
        owner, member = self.picture.owner[at], self.picture.member[at]
        x, y = (float(n) for n in centre)
        if owner == -2 and self.unit > 0.4:
            self.axes.text(x, y, "×", ha="center", va="center", color=LINE, fontsize=26 * self.unit, zorder=4)
        if owner < 0:
            return
        room = 72 * self.unit * size  # in points
        digits = len(str(self.picture.owner.max()))
        large = min(room[0] / (0.75 * max(digits, 1)), room[1] * (0.5 if self.picture.single else 0.38), 15)
        if large < 4.2:
            return
        self.labelled = True
        style: dict[str, Any] = {"ha": "center", "color": PAPER, "zorder": 4}
        if self.picture.single:
            self.axes.text(x, y, str(owner), va="center", fontsize=large, fontweight="bold", **style)
            return
        self.axes.text(x, y - 0.03, str(owner), va="bottom", fontsize=large, fontweight="bold", **style)
        self.axes.text(x, y + 0.05, str(member), va="top", fontsize=0.72 * large, alpha=0.85, **style)

    def numbers(self) -> None:
        """The coordinates of the chips, at the upper and the left edge, and of the planes."""
        x, y, z = self.picture.topology.torus.shape
        style: dict[str, Any] = {"fontsize": 7.5, "color": MUTED, "va": "center"}
        away = self.reach + 0.1 / self.unit
        for plane in range(z):
            left, top = (float(n) for n in self.at(np.array([0, 0, plane])))
            first = plane < self.across
            for i in range(x if self.numbered and first else 0):
                self.axes.text(left + i, top - away, f"x = {i}" if i == 0 else str(i), ha="center", **style)
            for i in range(y if self.numbered and plane % self.across == 0 else 0):
                self.axes.text(left - away + 0.06, top + i, f"y = {i}" if i == 0 else str(i), ha="right", **style)
            if z > 1:
                up = away + (_NUMBERS / self.unit if self.numbered and first else 0)
                bold = {**style, "color": INK, "fontsize": 8.5 if self.numbered else 7.0}
                self.axes.text(left - _CHIP / 2, top - up, f"z = {plane}", ha="left", **bold)

    def legend(self, assignment: DeviceAssignment | None) -> None:
        """The meaning of the shapes, below the chips, in as few rows as possible."""
        picture = self.picture
        below = "" if picture.single else f", below it the {picture.what}"
        numbers = f": its number{below}" if self.labelled else ""
        square: dict[str, Any] = {"linestyle": "none", "marker": "s", "markersize": 9}
        keys = [Line2D([], [], color=COLOURS[0], label=f"{picture.whose}{numbers}", **square)]
        if (picture.owner == -1).any():
            keys.append(Line2D([], [], color=SHARED, label="no replica's", **square))
        if (picture.owner == -2).any():
            keys.append(Line2D([], [], color=PAPER, markeredgecolor=LINE, label="missing", **square))
        if assignment is not None and _ring_links(assignment):
            keys.append(Line2D([], [], color=COLOURS[0], linewidth=3, label="from one logical device to the next"))
        if picture.topology.num_tasks > 1:
            keys.append(Line2D([], [], color=_RIM, markeredgecolor=LINE, label="a host", **square))
        if any(picture.topology.torus.wrap[:2]):
            keys.append(Line2D([], [], color=_AROUND, linewidth=3, label="open end: a link around"))
        if len(picture.layers()) > 1:
            around = ", and the last to the first" if picture.topology.torus.wrap[2] else ""
            keys.append(Line2D([], [], linestyle="none", label=f"each plane is linked to the next{around}"))
        corner = (_MARGIN / self.width, 0.65 / self.height)
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": corner, "borderpad": 0, "borderaxespad": 0}
        style: dict[str, Any] = {"fontsize": 8.5, "labelcolor": MUTED, "frameon": False, "handlelength": 1.2}
        space: dict[str, Any] = {"columnspacing": 1.5, "labelspacing": 0.4}
        for columns in range(len(keys), 0, -1):
            legend = self.figure.legend(handles=keys, ncols=columns, **place, **style, **space)
            if columns == 1 or legend.get_window_extent().x1 < self.figure.bbox.x1:
                break
            legend.remove()

    # --- drawing ----------------------------------------------------------------------------------------

    def text(self, x: float, y: float, text: str, size: float, color: str = INK, **style: Any) -> None:
        """Text, at a position in inches from the upper left corner."""
        self.figure.text(x / self.width, 1 - y / self.height, text, fontsize=size, color=color, va="center", **style)

    def _boxes(self, outlines: list[Outline], level: float, **style: Any) -> None:
        self.axes.add_collection(PathCollection(outlines, zorder=level, **style))

    def _box(self, low: np.ndarray, high: np.ndarray, radius: float) -> Outline:
        """A rectangle; with rounded corners if they are large enough to see."""
        style: Any = BoxStyle.Round(0, radius) if self.unit > 0.2 else BoxStyle.Square(0)
        outline: Outline = style(*low, *(high - low), 1)
        return outline

    def _thin(self, width: float) -> float:
        return width * min(1.0, max(self.unit / 0.7, 0.2))


def _ring_links(assignment: DeviceAssignment | None) -> dict[frozenset[tuple[int, ...]], int]:
    """Map the chips at both ends of a link to the replica whose consecutive logical devices use it."""
    if assignment is None:
        return {}
    chips = assignment.core_assignment[..., :3]
    following = np.roll(chips, -1, axis=1)
    beside = assignment.hops() == 1
    return {
        frozenset((tuple(chips[r, c].tolist()), tuple(following[r, c].tolist()))): r
        for r, c in np.argwhere(beside).tolist()
    }


def _title(topology: Topology) -> str:
    return topology.name or "×".join(map(str, topology.torus.shape)) + " chips"


def _facts(topology: Topology, assignment: DeviceAssignment | None) -> str:
    cores = int(topology.mesh_shape[3])
    around = topology.torus.around
    facts = [
        counted(math.prod(topology.torus.shape), "chip") + (f" of {cores} devices" if cores > 1 else ""),
        counted(topology.num_tasks, "host"),
        f"wraps around along {around}" if around else "no wrap-around",
    ]
    if assignment is not None:
        replicas, each = assignment.num_replicas, assignment.num_cores_per_replica
        facts.insert(0, f"{counted(replicas, 'replica')} of {counted(each, 'core')}")
    return "  ·  ".join(facts)
