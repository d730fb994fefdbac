"""The picture: step times over those by hand, predictions beside measurements, memory, and bandwidth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _accelerator.report import label

OURS, BY_HAND, PREDICTED, INK = "#1f6feb", "#8b949e", "#e3a008", "#24292f"


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw to ``path``; a panel without figures reads "not measured"."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, grid = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
        figure.suptitle(label(found), fontsize=11, color="#b42318" if found["device"].get("emulated") else INK)
        for axes, (title, panel) in zip(grid.flat, _PANELS.items(), strict=True):
            axes.set_title(title, loc="left", fontsize=10)
            if not panel(axes, found):
                axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes, color=BY_HAND)
                axes.set_axis_off()
        figure.savefig(path, dpi=110)
        plt.close(figure)


def _ratios(axes: Any, found: dict[str, Any]) -> bool:
    rows = found.get("training", [])
    if not rows:
        return False
    for place, row in enumerate(rows):
        low, high = row["ratio_95"]
        axes.plot([low, high], [place, place], color=OURS, linewidth=4, alpha=0.35, solid_capstyle="butt")
        axes.plot(row["ratio"], place, "o", color=OURS, markersize=5)
        axes.annotate(
            f"{row['ratio']:.2f}", (max(high, row["ratio"]), place), xytext=(5, -3), textcoords="offset points"
        )
    axes.axvline(1.0, color=BY_HAND, linewidth=1)
    axes.set_yticks(range(len(rows)), [f"{row['title']}, {row['devices']}, {row['way']}" for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.12)
    axes.set_xlabel("time of a step / by hand (below 1 is faster)")
    return True


def _predictions(axes: Any, found: dict[str, Any]) -> bool:
    rows = [row for row in found.get("plans", ()) if row["predicted_s"]]
    if not rows:
        return False
    _bars(
        axes,
        [f"{row['title']}, {row['devices']}" for row in rows],
        {
            "measured": (OURS, [1e3 * row["measured_s"] for row in rows]),
            "predicted": (PREDICTED, [1e3 * row["predicted_s"] for row in rows]),
        },
        "ms",
    )
    axes.set_xscale("log")
    return True


def _memory(axes: Any, found: dict[str, Any]) -> bool:
    peaks = {(row["model"], row["devices"], row["side"]): row["peak"] for row in found.get("memory", ())}
    rows = [row for row in found.get("plans", ()) if row["predicted_bytes"]]
    if not rows:
        return False
    unit, size = ("GiB", 2**30) if max(row["predicted_bytes"] for row in rows) > 2**30 else ("MiB", 2**20)
    series = {"predicted": (PREDICTED, [row["predicted_bytes"] / size for row in rows])}
    for side, name, color in (("replicax", "peak, Replicax", OURS), ("hand", "peak, by hand", BY_HAND)):
        values = [(peaks.get((row["model"], row["devices"], side)) or 0) / size for row in rows]
        if any(values):
            series[name] = (color, values)
    _bars(axes, [f"{row['title']}, {row['devices']}" for row in rows], series, unit)
    return True


def _bandwidth(axes: Any, found: dict[str, Any]) -> bool:
    rows = found.get("sums", [])
    if not rows:
        return False
    axes.plot([r["bytes"] for r in rows], [r["bandwidth"] / 1e9 for r in rows], "o-", color=OURS, label="measured")
    predicted = [r for r in rows if r["predicted_s"]]
    rates = [r["bandwidth"] * r["seconds"] / r["predicted_s"] / 1e9 for r in predicted]
    axes.plot([r["bytes"] for r in predicted], rates, "s--", color=PREDICTED, label="predicted")
    if rows[0]["link"] and not found["device"].get("emulated"):
        axes.axhline(rows[0]["link"] / 1e9, color=BY_HAND, linewidth=1, label="the links")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bytes of float32 on each device")
    axes.set_ylabel("GB/s over each link of a ring")
    axes.legend(frameon=False)
    return True


def _bars(axes: Any, names: list[str], series: dict[str, tuple[str, list[float]]], unit: str) -> None:
    height = 0.8 / max(1, len(series))
    for number, (name, (color, values)) in enumerate(series.items()):
        places = [i + (number - (len(series) - 1) / 2) * height for i in range(len(names))]
        axes.barh(places, values, height=0.9 * height, color=color, label=name)
        for place, value in zip(places, values, strict=True):
            if value:
                axes.annotate(f"{value:.3g}", (value, place), xytext=(3, -3), textcoords="offset points", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.margins(x=0.15)
    axes.set_xlabel(unit)
    axes.legend(frameon=False, fontsize=8)


_PANELS = {
    "A step, beside the same by hand": _ratios,
    "A step, predicted and measured": _predictions,
    "Memory of a device, predicted and measured": _memory,
    "Sums over all devices": _bandwidth,
}
