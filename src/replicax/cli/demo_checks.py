"""What ``replicax demo`` found, against what it promises."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.table

    from replicax.cli.example import Training

MIN_ACCURACY = 0.97
MAX_SECONDS = 60.0
EARLY_STEP = 20
MAX_PARAMETER_DIFFERENCE = 1e-5
MAX_ACCURACY_DIFFERENCE = 0.5  # in points of a hundred


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the report.

    Attributes:
      what: was measured.
      shown: the measurement, in words.
      reference: the same for the training on one device, where that makes sense.
      target: what was promised, if anything was.
      met: whether the promise was kept.
    """

    what: str
    shown: str
    reference: str = ""
    target: str = ""
    met: bool = True


def compare(ours: Training, reference: Training, *, by_default: bool) -> list[Row]:
    """The rows of the report.

    Args:
      ours: the training with the chosen strategy.
      reference: the same training on one device.
      by_default: whether it ran for the default number of epochs. How well it learns, and how fast, is promised
        for that only; that strategies learn the same is promised always.
    """
    import numpy as np

    pairs = zip(ours.early, reference.early, strict=True)
    parameters = max(float(np.max(np.abs(a - b))) for a, b in pairs)
    accuracy, seconds = ours.accuracies[-1], ours.seconds
    points = 100 * abs(accuracy - reference.accuracies[-1])
    rows = [
        Row(
            "Test accuracy",
            f"{accuracy:.2%}",
            f"{reference.accuracies[-1]:.2%}",
            f"at least {MIN_ACCURACY:.0%}",
            accuracy >= MIN_ACCURACY,
        ),
        Row(
            "Training time",
            f"{seconds:.1f} s",
            f"{reference.seconds:.1f} s",
            f"below {MAX_SECONDS:.0f} s",
            seconds < MAX_SECONDS,
        ),
        Row(
            "Final accuracy differs by",
            f"{points:.2f} points",
            "",
            f"below {MAX_ACCURACY_DIFFERENCE} points",
            points < MAX_ACCURACY_DIFFERENCE,
        ),
    ]
    if not by_default:
        rows = [dataclasses.replace(row, target="", met=True) for row in rows]
    quality, time, difference = rows
    return [
        quality,
        time,
        Row("Examples per second", f"{ours.examples_per_second:,.0f}", f"{reference.examples_per_second:,.0f}"),
        Row("Times the step was traced", str(ours.traces), str(reference.traces), "1", ours.traces == 1),
        Row("All-reduces per step", str(len(_reduced(ours))), str(len(_reduced(reference)))),
        Row("Bytes reduced per step", f"{sum(_reduced(ours)):,}", f"{sum(_reduced(reference)):,}"),
        *[
            Row(f"{kind[0].upper()}{kind[1:]}s per step", str(count), "0")
            for kind, count in sorted(collections.Counter(c.kind for c in ours.collectives).items())
            if kind != "all-reduce"
        ],
        Row(
            f"Largest difference of a parameter after {ours.early_step} steps",
            f"{parameters:.1e}",
            "",
            f"below {MAX_PARAMETER_DIFFERENCE:.0e}".replace("e-0", "e-"),
            parameters < MAX_PARAMETER_DIFFERENCE,
        ),
        difference,
    ]


def table(title: str, heading: str, rows: Sequence[Row]) -> rich.table.Table:
    """The rows as a table under ``title``; ``heading`` names the chosen strategy's column."""
    from rich import box
    from rich.table import Table

    drawn = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("", max_width=32)
    for name in (heading, "one device", "target"):
        drawn.add_column(name, justify="right", no_wrap=True)
    drawn.add_column("")
    for row in rows:
        mark = "" if not row.target else "[green]met[/]" if row.met else "[red]missed[/]"
        shown = row.shown if row.met else f"[red]{row.shown}[/]"
        drawn.add_row(row.what, shown, row.reference, row.target, mark)
    return drawn


def _reduced(training: Training) -> list[int]:
    return [c.bytes for c in training.collectives if c.kind == "all-reduce"]
