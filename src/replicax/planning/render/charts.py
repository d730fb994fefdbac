"""The pictures of a plan: where the memory goes, where the time goes, and how it scales.

They are drawn on figures of their own and not on ``pyplot``'s: nothing global, and no display needed.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import NullLocator, PercentFormatter

from replicax.planning.timeline.peak import ACTIVATIONS, COPIES, INPUTS, OTHERS, OUTPUTS, PROGRAM, VARIABLES
from replicax.system.quantities import BYTES, SECONDS, bytes_in_words, seconds_in_words, unit_of
from replicax.tpu.core_owners import COLOURS, INK, LINE, MUTED, PAPER, SHARED

if TYPE_CHECKING:
    from replicax.planning.report import Plan

_BLUE, _RED, _GREEN, _YELLOW, _CYAN, _PURPLE, *_OTHERS = COLOURS
_PARTS = {
    "arguments": _BLUE,
    "temporaries": _YELLOW,
    VARIABLES: _BLUE,
    INPUTS: _CYAN,
    COPIES: _RED,
    ACTIVATIONS: _GREEN,
    OTHERS: _YELLOW,
    OUTPUTS: _PURPLE,
    PROGRAM: INK,
}
_TIMES = {
    "compute": _BLUE,
    "memory": _YELLOW,
    "communication": _RED,
    "between slices": _PURPLE,
    "arithmetic": _CYAN,
    "launches": _GREEN,
}


def memory_picture(plan: Plan) -> Figure:
    """A bar of what the memory holds, and how much there is."""
    memory = plan.memory
    figure, axes = _figure(1.9)
    parts = memory.peak or {
        "arguments": memory.arguments,
        "outputs": memory.outputs - memory.aliased,
        "temporaries": memory.temporaries,
        "program": memory.code,
    }
    scale, unit = unit_of(max(memory.total, memory.capacity or 0), BYTES)
    whole = _stack(axes, [(name, size / scale, bytes_in_words(size), _PARTS[name]) for name, size in parts.items()])
    if memory.capacity is not None:
        capacity = memory.capacity / scale
        axes.axvline(capacity, color=INK, linewidth=2)
        words, left = f"there is {bytes_in_words(memory.capacity)}", capacity - 0.006 * max(capacity, whole)
        axes.text(left, 0.46, words, ha="right", va="center", color=INK, fontsize=9)
    axes.set_xlim(0, 1.04 * max(whole, (memory.capacity or 0) / scale) or 1)
    axes.set_ylim(-0.4, 0.62)
    axes.set_xlabel(f"{unit} on each device", color=INK)
    return figure


def time_picture(plan: Plan) -> Figure:
    """Draw how long each resource is busy in a step."""
    assert plan.estimate is not None
    figure, axes = _figure(1.9)
    optional = ("launches", "arithmetic", "between slices")
    given = tuple(name for name in optional if getattr(plan.estimate, name.replace(" ", "_")))
    names = (*given, "communication", "memory", "compute")
    seconds = [float(getattr(plan.estimate, name.replace(" ", "_"))) for name in names]
    scale, unit = unit_of(max(seconds), SECONDS)
    bars = axes.barh(names, [s / scale for s in seconds], color=[_TIMES[name] for name in names], height=0.6)
    axes.bar_label(bars, [seconds_in_words(s) for s in seconds], padding=5, color=INK, fontsize=9)
    axes.set_xlim(0, 1.15 * max(seconds) / scale or 1)
    axes.set_xlabel(f"{unit} in each step, at the chip's peak (a bound)", color=INK)
    return figure


def step_picture(plan: Plan) -> Figure:
    """Draw where the predicted time of a step goes: kernels by their kind, and waiting for collectives."""
    timeline = plan.timeline
    assert timeline is not None
    figure, axes = _figure(1.9)
    colours = itertools.cycle((_BLUE, _YELLOW, _GREEN, _CYAN, _PURPLE, *_OTHERS))
    parts = [(name, s, colour) for (name, s), colour in zip(timeline.by_kind.items(), colours, strict=False)]
    if timeline.exposed:
        parts.append(("waiting for collectives", timeline.exposed, _RED))
    scale, unit = unit_of(timeline.seconds, SECONDS)
    whole = _stack(axes, [(name, s / scale, seconds_in_words(s), colour) for name, s, colour in parts])
    axes.set_xlim(0, 1.04 * whole or 1)
    axes.set_xlabel(f"{unit} of a step (a prediction)", color=INK)
    return figure


def scaling_picture(plan: Plan) -> Figure:
    """The predicted time of a step, and the efficiency, from one replica to all."""
    figure, (left, right) = _figure(3.6, columns=2)
    points = plan.scaling
    replicas = [p.replicas for p in points]
    scale, unit = unit_of(max(p.seconds for p in points), SECONDS)
    style: dict[str, Any] = {"marker": "o", "markersize": 4}
    left.plot(replicas, [p.seconds / scale for p in points], color=_TIMES["compute"], label="a step", **style)
    waits = [p.exposed / scale for p in points]
    left.plot(replicas, waits, color=_TIMES["communication"], label="of it waiting for collectives", **style)
    right.plot(replicas, [p.efficiency for p in points], color=_TIMES["compute"], **style)
    left.set_title(f"a step, in {unit}", loc="left", color=INK, fontsize=10)
    left.set_ylim(0, 1.08 * max(p.seconds for p in points) / scale or 1)
    right.set_title("efficiency of a replica, against one alone", loc="left", color=INK, fontsize=10)
    right.set_ylim(0, 1.05)
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for axes in (left, right):
        if replicas[-1] > 1:
            axes.set_xscale("log", base=2)
        axes.set_xticks(replicas if len(replicas) <= 8 else replicas[:: -(-len(replicas) // 7)])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("replicas, each with its batch (a prediction by formula)", color=INK)
    left.legend(frameon=False, labelcolor=INK, fontsize=9)
    return figure


def as_svg(figure: Figure) -> str:
    """A figure as an ``<svg>`` element."""
    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "replicax"}):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return text.getvalue()[text.getvalue().index("<svg") :]


def _stack(axes: Any, parts: Iterable[tuple[str, float, str, str]]) -> float:
    """Draw one bar of parts (name, length, amount in words, colour), with a legend; returns the length of all."""
    start = 0.0
    for name, length, amount, colour in parts:
        axes.barh(0, length, left=start, height=0.6, color=colour, edgecolor=PAPER, label=f"{name} {amount}")
        start += length
    axes.set_yticks([])
    axes.figure.legend(frameon=False, labelcolor=INK, ncols=3, loc="outside lower center", fontsize=9)
    return start


def _figure(height: float, columns: int = 1) -> tuple[Figure, Any]:
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06)
    figure = Figure(figsize=(9.6, height), layout=layout, facecolor=PAPER)
    found = figure.subplots(1, columns, squeeze=False)[0]
    for axes in found:
        axes.grid(color=SHARED, linewidth=0.8, axis="x" if columns == 1 else "both")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(LINE)
        axes.tick_params(colors=MUTED, which="both", labelsize=9)
    return figure, found[0] if columns == 1 else found
