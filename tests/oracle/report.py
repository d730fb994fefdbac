"""The tables that the oracle prints."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.oracle.comparing import Finding, Verdict
from tests.oracle.running import Outcome

COUNTED = (Verdict.AGREE, Verdict.DIFFER_ON_PURPOSE, Verdict.NOT_YET, Verdict.UNEXPLAINED)


@dataclasses.dataclass(frozen=True)
class Differences:
    """One table: a row for each program, with its name, what two sides did, and why they differ."""

    title: str
    columns: tuple[str, str]
    rows: list[tuple[str, str, str, str]]


def differences(findings: Sequence[Finding]) -> Iterator[Differences]:
    """The tables of what is known to differ."""
    for verdict, title in (
        (Verdict.DIFFER_ON_PURPOSE, "Where Replicax differs on purpose"),
        (Verdict.NOT_YET, "What Replicax does not do yet"),
    ):
        rows = [
            (f.program.name, show(f.tensorflow), show(f.replicax), f.program.differs or f.program.not_yet or "")
            for f in findings
            if f.libraries is verdict
        ]
        yield Differences(title, ("tf.distribute", "Replicax"), rows)
    rows = [
        (f.program.name, show(f.replicax), show(f.exact), f.program.executors_differ or "")
        for f in findings
        if f.executors is Verdict.DIFFER_ON_PURPOSE
    ]
    yield Differences(
        "Where Replicax's per-replica executor does what the compiled one can't", ("compiled", "exact"), rows
    )


def print_report(console: Console, findings: Sequence[Finding]) -> None:
    """Counts by topic; then each difference that is known, with its reason; then what nothing explains."""
    console.print(_by_topic(findings))
    for found in differences(findings):
        if found.rows:
            console.print(_table(found))
    for finding in findings:
        if finding.overall is Verdict.UNEXPLAINED:
            _print_unexplained(console, finding)
    console.print(summary(findings), highlight=False)


def summary(findings: Sequence[Finding]) -> str:
    """One line of counts."""
    counts = Counter(f.overall for f in findings)
    return f"{len(findings)} programs: " + ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in COUNTED)


def markdown(findings: Sequence[Finding]) -> str:
    """Everything that differs, as a document."""
    lines = [f"# {_title()}", "", "Written by `make oracle ARGS='--markdown tests/oracle/differences.md'`.", ""]
    lines += [summary(findings) + ".", ""]
    for found in differences(findings):
        if found.rows:
            lines += [f"## {found.title}", "", _line(["program", *found.columns, "because"]), _line(["---"] * 4)]
            lines += [_line([name, f"`{one}`", f"`{other}`", reason]) for name, one, other, reason in found.rows]
            lines.append("")
    if unexplained := [f for f in findings if f.overall is Verdict.UNEXPLAINED]:
        lines += ["## What nothing explains", "", _line(["program", "tf.distribute", "compiled", "exact"])]
        lines.append(_line(["---"] * 4))
        for f in unexplained:
            lines.append(_line([f.program.name, *(f"`{show(o)}`" for o in (f.tensorflow, f.replicax, f.exact))]))
        lines.append("")
    return "\n".join(lines)


def _title() -> str:
    return f"tf.distribute of TensorFlow {version('tensorflow-cpu')}, and Replicax on JAX {version('jax')}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _by_topic(findings: Iterable[Finding]) -> Table:
    table = Table(title=_title())
    table.add_column("topic")
    for name in ("programs", *(verdict.value for verdict in COUNTED)):
        table.add_column(name, justify="right")
    for topic, group in groupby(findings, key=lambda f: f.program.topic):
        counts = Counter(f.overall for f in group)
        cells = [str(counts[verdict]) for verdict in COUNTED]
        if counts[Verdict.UNEXPLAINED]:
            cells[-1] = f"[bold red]{cells[-1]}[/]"
        table.add_row(topic, str(counts.total()), *cells)
    return table


def _table(found: Differences) -> Table:
    table = Table(title=found.title, show_lines=True)
    for name, ratio in zip(("program", *found.columns, "because"), (3, 2, 2, 4), strict=True):
        table.add_column(name, ratio=ratio)
    for row in found.rows:
        table.add_row(*map(escape, row))
    return table


def _print_unexplained(console: Console, finding: Finding) -> None:
    program = finding.program
    console.print(f"[bold red]{escape(program.name)}[/]")
    for pair, verdict, reason in (
        ("TensorFlow and Replicax", finding.libraries, program.differs or program.not_yet),
        ("the two executors", finding.executors, program.executors_differ),
    ):
        if verdict is Verdict.UNEXPLAINED:
            console.print(f"  {pair} differ, and the program does not say why")
        elif verdict is Verdict.STALE:
            console.print(f"  {pair} agree, but the program says that they differ: {escape(str(reason))}")
    sides = {"TensorFlow": finding.tensorflow, "Replicax, compiled": finding.replicax, "Replicax, exact": finding.exact}
    for name, outcome in sides.items():
        console.print(f"  {name}: {escape(show(outcome))}", highlight=False)
        if "message" in outcome:
            console.print(f"    {escape(outcome['message'])}", highlight=False)


# --- outcomes, as short as they can be ---------------------------------------------------------------------


def show(outcome: Outcome) -> str:
    """An outcome in a few characters."""
    return str(outcome["error"]) if "error" in outcome else show_value(outcome["value"])


def show_value(value: Any) -> str:
    """A plain value, the way Python would print what it stands for."""
    if isinstance(value, float):
        return f"{value:.1f}" if value.is_integer() and abs(value) < 1e6 else f"{value:.6g}"
    if isinstance(value, list):
        return f"[{', '.join(map(show_value, value))}]"
    if isinstance(value, dict):
        [(kind, content)] = value.items()
        if kind == "error":
            return str(content)
        if kind == "tuple":
            return f"({', '.join(map(show_value, content))}{',' if len(content) == 1 else ''})"
        if isinstance(content, list):
            return f"{kind}({', '.join(map(show_value, content))})"
        items = ", ".join(f"{name}={show_value(item)}" for name, item in content.items())
        return f"{{{items}}}" if kind == "dict" else f"{kind}({items})"
    return repr(value)
