"""Ranks the results of a search: the best case, what bounds each, and why others fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from replicax.cli.search.choices import SearchCase
from replicax.system.quantities import bytes_in_words, seconds_in_words

if TYPE_CHECKING:
    from rich.console import Console

VERSION = 1
"""The version of the JSON: it grows when a field changes its meaning."""

_ORDER = ("fits", "does not fit", "failed")


@dataclasses.dataclass(frozen=True)
class CaseOutcome:
    """A case with its result."""

    case: SearchCase
    # ``"fits"``, also if the size of the memory is unknown; ``"does not fit"``; or ``"failed"``: it could not be
    # planned.
    state: str
    reason: str = ""  # why it does not fit, or could not be planned
    seconds: float | None = None  # the predicted time of a step, by its schedule; ``None`` if there is no prediction
    at_least: float | None = None  # a lower bound of that time
    bound_by: str = ""  # the part that takes longest
    memory: int | None = None  # what it needs on one device, in bytes
    capacity: int | None = None  # the memory of one device, in bytes
    examples: int | None = None  # in a step, on all replicas; ``None`` if it takes none
    replicas: int | None = None
    planned_in: float = 0.0  # how long tracing and compiling took, in seconds, with everything around it

    @classmethod
    def failed(cls, case: SearchCase, reason: str, planned_in: float = 0.0) -> CaseOutcome:
        """The outcome of a case that could not be planned."""
        return cls(case, "failed", reason, planned_in=planned_in)

    @classmethod
    def of(cls, case: SearchCase, found: dict[str, Any], planned_in: float = 0.0) -> CaseOutcome:
        """The outcome of a case with the data of its plan, or of what is known without one."""
        memory = found["memory"]
        fits = found["fits"] is not False
        reason = ""
        if not fits:
            reason = f"{bytes_in_words(memory['total'])} of {bytes_in_words(memory['capacity'])}"
            if found.get("is_pruned"):
                reason = f"its variables alone need {reason}"
        estimate, timeline = ((found.get(name) if fits else None) or {} for name in ("estimate", "timeline"))
        return cls(
            case=case,
            state="fits" if fits else "does not fit",
            reason=reason,
            seconds=timeline.get("seconds"),
            at_least=estimate.get("at_least"),
            bound_by=estimate.get("bound_by", ""),
            memory=memory["total"],
            capacity=memory["capacity"],
            examples=found["examples"],
            replicas=found["replicas"],
            planned_in=planned_in,
        )

    @property
    def key(self) -> tuple[int, float, float]:
        """The sort key: cases that fit come first, and among these the faster ones."""
        inf = float("inf")
        each = self.examples or 1  # the time of an example, as programs may choose batches themselves
        times = [inf if s is None else s / each for s in (self.seconds, self.at_least)]
        if self.state == "does not fit":
            times = [float(self.memory or inf), 0.0]
        return _ORDER.index(self.state), times[0], times[1]

    @property
    def in_a_line(self) -> str:
        """The case and its result in a line."""
        if self.state == "fits" and self.seconds is not None:
            found = f"{seconds_in_words(self.seconds)}, bound by {self.bound_by}"
        else:
            found = self.state + (f": {self.reason}" if self.reason else "")
        return f"{self.case}: {found}"


def as_data(rows: Sequence[CaseOutcome], commands: dict[SearchCase, str], unfinished: Sequence[SearchCase]) -> Any:
    """The result of a search, as dicts, lists, strings and numbers."""
    cases = [{**dataclasses.asdict(row), "case": dict(row.case.values), "command": commands[row.case]} for row in rows]
    return {"version": VERSION, "cases": cases, "unfinished": [dict(case.values) for case in unfinished]}


def print_ranking(rows: Sequence[CaseOutcome], console: Console) -> None:
    """Print the cases as a table, the best first."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    names = list(dict.fromkeys(name for row in rows for name, _ in row.case.values))
    batches = {row.examples for row in rows if row.state == "fits"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    if len(batches) > 1:
        table.add_column("examples", justify="right")
    for heading in ("a step", "at least", "needs"):
        table.add_column(heading, justify="right", overflow="fold")  # a narrow terminal cuts nothing off
    table.add_column("bound by, or why not", overflow="fold")
    for row in rows:
        values = dict(row.case.values)
        cells = [values[name] for name in names]
        if len(batches) > 1:
            cells.append("" if row.examples is None else f"{row.examples:,}")
        cells += ["" if s is None else seconds_in_words(s) for s in (row.seconds, row.at_least)]
        cells.append("" if row.memory is None else bytes_in_words(row.memory))
        why = row.bound_by if row.state == "fits" else f"{row.state}: {row.reason}"
        table.add_row(*map(Text, [*cells, why]), style="" if row.state == "fits" else "dim")
    console.print(table)
    if len(batches) > 1:
        console.print(
            "The cases differ in the examples of a step, as the function chooses them; they are in the order of the "
            "time for one example. --batch gives all the same.",
            style="dim",
        )
