"""The pictures of a plan: where the memory goes, where the time goes, and how it scales.

They are drawn on figures of their own and not on ``pyplot``'s: nothing global, and no display needed.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from replicax.devices.memory_sizes import bytes_in_words, unit_of
from replicax.planning.render.numbers import seconds_in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from replicax.planning.report import Plan

# Paul Tol's bright colours, which stay apart for the colour-blind too.
_COLOURS = {"arguments": "#4477AA", "outputs": "#228833", "temporaries": "#CCA011", "program": "#AA3377"}
_TIMES = {"compute": "#4477AA", "memory": "#CCA011", "communication": "#EE6677"}
_INK, _MUTED, _LINE, _SHARED, _PAPER = "#22262B", "#6B7280", "#C4CAD3", "#E9ECF1", "#FFFFFF"


def memory_picture(plan: Plan) -> Figure:
    """A bar of what the memory holds, and how much there is."""
    memory = plan.memory
    figure, axes = _figure(1.9)
    parts = {
        "arguments": memory.arguments,
        "outputs": memory.outputs - memory.aliased,
        "temporaries": memory.temporaries,
        "program": memory.code,
    }
    scale, unit = unit_of(max(memory.total, memory.capacity or 0))
    start = 0.0
    for name, size in parts.items():
        label = f"{name} {bytes_in_words(size)}"
        axes.barh(0, size / scale, left=start, height=0.6, color=_COLOURS[name], edgecolor=_PAPER, label=label)
        start += size / scale
    if memory.capacity is not None:
        capacity = memory.capacity / scale
        axes.axvline(capacity, color=_INK, linewidth=2)
        side = {"ha": "right", "x": capacity - 0.006 * max(capacity, start)}
        axes.text(y=0.46, s=f"there is {bytes_in_words(memory.capacity)}", va="center", color=_INK, fontsize=9, **side)
    axes.set_xlim(0, 1.04 * max(start, (memory.capacity or 0) / scale) or 1)
    axes.set_ylim(-0.4, 0.62)
    axes.set_yticks([])
    axes.set_xlabel(f"{unit} on each device", color=_INK)
    figure.legend(frameon=False, labelcolor=_INK, ncols=4, loc="outside lower center", fontsize=9)
    return figure


def time_picture(plan: Plan) -> Figure:
    """How long each resource is busy in a step."""
    assert plan.estimate is not None
    figure, axes = _figure(1.9)
    names = ("communication", "memory", "compute")
    seconds = [float(getattr(plan.estimate, name)) for name in names]
    scale, unit = _unit(max(seconds))
    axes.barh(names, [s / scale for s in seconds], color=[_TIMES[name] for name in names], height=0.6)
    for row, value in enumerate(seconds):
        axes.text(value / scale, row, f"  {seconds_in_words(value)}", va="center", color=_INK, fontsize=9)
    axes.set_xlim(0, 1.15 * max(seconds) / scale or 1)
    axes.set_xlabel(f"{unit} in each step, at the chip's peak (an estimate)", color=_INK)
    return figure


def scaling_picture(plan: Plan) -> Figure:
    """The predicted time of a step, and the efficiency, from one replica to all."""
    from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

    figure, left = _figure(3.6, columns=2)
    left, right = left
    points = plan.scaling
    replicas = [p.replicas for p in points]
    scale, unit = _unit(max(p.estimate.sequential for p in points))
    style: dict[str, Any] = {"marker": "o", "markersize": 4}
    for name, colour, get in (
        ("collectives overlap with nothing", _TIMES["communication"], "sequential"),
        ("everything overlaps", _TIMES["compute"], "overlapped"),
    ):
        left.plot(replicas, [getattr(p.estimate, get) / scale for p in points], color=colour, label=name, **style)
        shares = [p.efficiency if get == "sequential" else p.efficiency_overlapped for p in points]
        right.plot(replicas, shares, color=colour, label=name, **style)
    left.set_title(f"a step, in {unit}", loc="left", color=_INK, fontsize=10)
    left.set_ylim(0, 1.08 * max(p.estimate.sequential for p in points) / scale or 1)
    right.set_title("efficiency of a replica, against one alone", loc="left", color=_INK, fontsize=10)
    right.set_ylim(0, 1.05)
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for axes in (left, right):
        if replicas[-1] > 1:
            axes.set_xscale("log", base=2)
        axes.set_xticks(replicas if len(replicas) <= 8 else replicas[:: -(-len(replicas) // 7)])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
        axes.set_xlabel("replicas, each with its batch (a prediction by formula)", color=_INK)
        axes.legend(frameon=False, labelcolor=_INK, fontsize=9)
    return figure


def as_svg(figure: Figure) -> str:
    """A figure as an ``<svg>`` element."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "replicax"}):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return text.getvalue()[text.getvalue().index("<svg") :]


def _figure(height: float, columns: int = 1) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06)
    figure = Figure(figsize=(9.6, height), layout=layout, facecolor=_PAPER)
    found = figure.subplots(1, columns, squeeze=False)[0]
    for axes in found:
        axes.grid(color=_SHARED, linewidth=0.8, axis="x" if columns == 1 else "both")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_LINE)
        axes.tick_params(colors=_MUTED, which="both", labelsize=9)
    return figure, found[0] if columns == 1 else found


def _unit(largest: float) -> tuple[float, str]:
    return next(((u, name) for u, name in ((1.0, "s"), (1e-3, "ms")) if largest >= u), (1e-6, "µs"))
