"""Draw plans beside each other, from what ``replicax plan --json`` has written: where time goes, or where memory goes.

    replicax plan model.py --topology l40s:8 --strategy sharded --json l40s.json
    replicax plan model.py --topology h100:8 --strategy sharded --json h100.json
    python tools/docs/plan_pictures.py time picture.svg "8 L40S=l40s.json" "8 H100=h100.json"
    python tools/docs/plan_pictures.py memory picture.svg "mirrored=mirrored.json" "sharded=l40s.json"

The pictures of the tutorial on GPUs are made so.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from replicax.planning.timeline.peak import ACTIVATIONS, COPIES, INPUTS, OTHERS, VARIABLES
from replicax.system.quantities import bytes_in_words, seconds_in_words

COLOURS = {
    "product": "#4269d0",
    "elementwise": "#efb118",
    "reduction": "#3ca951",
    "transposition": "#6cc5b0",
    "gather": "#a463f2",
    "waiting for collectives": "#ff725c",
    "kernels slowed by collectives": "#c9ced6",
    VARIABLES: "#4269d0",
    INPUTS: "#6cc5b0",
    COPIES: "#ff725c",
    ACTIVATIONS: "#3ca951",
    OTHERS: "#efb118",
}
SMALL = 0.005
"""Parts below this share of the longest bar are left out."""


def times(plan: dict[str, Any]) -> dict[str, float]:
    timeline = plan["timeline"]
    parts = {**timeline["by_kind"], "waiting for collectives": timeline["exposed"]}
    return {**parts, "kernels slowed by collectives": timeline["seconds"] - sum(parts.values())}


def memory(plan: dict[str, Any]) -> dict[str, float]:
    return dict(plan["memory"]["peak"])


def draw(parts: dict[str, dict[str, float]], scale: float, unit: str, words: Any) -> Figure:
    """A bar for each plan, with its parts one after the other."""
    figure = Figure(figsize=(8, 1.1 + 0.55 * len(parts)), layout="constrained")
    axes = figure.subplots()
    longest = max(sum(each.values()) for each in parts.values())
    for place, each in enumerate(parts.values()):
        start = 0.0
        for kind, size in each.items():
            if size > SMALL * longest:
                known = axes.get_legend_handles_labels()[1]
                label = "" if kind in known else kind
                axes.barh(place, size / scale, left=start, color=COLOURS.get(kind, "#9498a0"), height=0.6, label=label)
                start += size / scale
        axes.text(start + 0.01 * longest / scale, place, words(sum(each.values())), va="center", fontsize=9)
    axes.set_yticks(range(len(parts)), list(parts))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.14 * longest / scale)
    axes.set_xlabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, ncols=3, loc="outside lower center", fontsize=9)
    return figure


def main() -> None:
    what, path, *given = sys.argv[1:]
    plans = {name: json.loads(Path(file).read_text()) for name, _, file in (text.partition("=") for text in given)}
    if what == "time":
        each = {name: times(plan) for name, plan in plans.items()}
        figure = draw(each, 1e-3, "ms of a step (a prediction)", seconds_in_words)
    else:
        sizes = {name: memory(plan) for name, plan in plans.items()}
        figure = draw(sizes, 2**30, "GiB on each GPU, when it is fullest", lambda size: bytes_in_words(int(size)))
    with mpl.rc_context({"svg.hashsalt": "replicax"}):
        figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


if __name__ == "__main__":
    main()
