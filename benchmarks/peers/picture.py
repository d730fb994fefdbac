"""The picture: the time of a step of each peer, a panel for each model and number of replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers.problems import MAKERS, problem
from benchmarks.peers.roster import BY_NAME, REPLICAS

OURS, BY_HAND, OTHERS = "#1f6feb", "#8b949e", "#d0d7de"


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw to ``path``."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    cases = {(case["problem"], case["replicas"]): case["peers"] for case in found["cases"]}
    style = {"svg.hashsalt": "peers", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(style):
        figure, grid = plt.subplots(len(REPLICAS), len(MAKERS), figsize=(11, 6.4), layout="constrained", squeeze=False)
        for row, replicas in zip(grid, REPLICAS, strict=True):
            here = [peers for (_, n), peers in cases.items() if n == replicas]
            names = [name for name in BY_NAME if any(name in peers for peers in here)]
            for axes, name in zip(row, MAKERS, strict=True):
                axes.set_title(f"{problem(name).title}, {replicas} replicas", loc="left", fontsize=10)
                _panel(axes, cases.get((name, replicas), {}), names, labels=name == next(iter(MAKERS)))
        for axes in grid[-1]:
            axes.set_xlabel("ms a step (shorter is better)")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def _panel(axes: Any, peers: dict[str, Any], names: list[str], labels: bool) -> None:
    longest = max((figures["step_ms_95"][1] for figures in peers.values()), default=1.0)
    for place, name in enumerate(names):
        if name not in peers:
            continue
        figures = peers[name]
        ms, (low, high) = figures["step_ms"], figures["step_ms_95"]
        color = OURS if name.startswith("replicax") else BY_HAND if name.startswith("jax") else OTHERS
        axes.barh(place, ms, color=color, height=0.7)
        axes.plot([low, high], [place, place], color="#24292f", linewidth=1)
        axes.text(max(ms, high) + 0.02 * longest, place, f"{ms:.3g}", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), [BY_NAME[name].title for name in names] if labels else [""] * len(names))
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.15 * longest)
    axes.set_ylim(len(names) - 0.4, -0.6)
