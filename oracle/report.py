"""The tables that the oracle prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from oracle.comparing import Finding, Verdict
from oracle.running import Outcome


def print_report(console: Console, findings: Sequence[Finding]) -> None:
    """Agreements by topic; then each difference that is meant, with its reason; then what nothing explains."""
    console.print(_by_topic(findings))
    on_purpose = [f for f in findings if f.libraries is Verdict.DIFFER_ON_PURPOSE]
    if on_purpose:
        console.print(_differences("Where Replicax differs on purpose", on_purpose))
    executors = [f for f in findings if f.executors is Verdict.DIFFER_ON_PURPOSE]
    if executors:
        console.print(_executors(executors))
    for finding in findings:
        if not finding.is_explained:
            _print_unexplained(console, finding)
    console.print(summary(findings))


def summary(findings: Sequence[Finding]) -> str:
    """One line of counts."""
    counts = {verdict: sum(f.libraries is verdict for f in findings) for verdict in Verdict}
    unexplained = sum(not f.is_explained for f in findings)
    agree = sum(f.is_explained and f.libraries is Verdict.AGREE for f in findings)
    differ = len(findings) - unexplained - agree
    stale = f" ({counts[Verdict.STALE]} with a stale reason)" if counts[Verdict.STALE] else ""
    return f"{len(findings)} programs: {agree} agree, {differ} differ on purpose, {unexplained} unexplained{stale}"


def show(outcome: Outcome) -> str:
    """An outcome in a few characters."""
    return str(outcome["error"]) if "error" in outcome else show_value(outcome["value"])


def show_value(value: Any) -> str:
    """A plain value, the way Python would print what it stands for."""
    if isinstance(value, float):
        return f"{value:.6g}" if value != int_or_none(value) else f"{value:.1f}"
    if isinstance(value, list):
        return f"[{', '.join(map(show_value, value))}]"
    if isinstance(value, dict) and len(value) == 1:
        [(kind, content)] = value.items()
        if kind == "error":
            return str(content)
        if kind == "tuple":
            return f"({', '.join(map(show_value, content))}{',' if len(content) == 1 else ''})"
        if isinstance(content, list):
            return f"{kind}({', '.join(map(show_value, content))})"
        if isinstance(content, dict):
            return f"{kind}({', '.join(f'{k}={show_value(v)}' for k, v in content.items())})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {show_value(v)}' for k, v in value.items())}}}"
    return repr(value)


def int_or_none(value: float) -> int | None:
    """The integer that ``value`` is, if it is a small one."""
    return int(value) if abs(value) < 1e6 and value == int(value) else None


def _by_topic(findings: Iterable[Finding]) -> Table:
    table = Table(title="tf.distribute and Replicax")
    for column in ("topic", "programs", "agree", "differ on purpose", "unexplained"):
        table.add_column(column, justify="left" if column == "topic" else "right")
    for topic, group in groupby(findings, key=lambda f: f.program.topic):
        members = list(group)
        unexplained = sum(not f.is_explained for f in members)
        agree = sum(f.is_explained and f.libraries is Verdict.AGREE for f in members)
        differ = len(members) - agree - unexplained
        table.add_row(
            topic, str(len(members)), str(agree), str(differ), f"[{'red' if unexplained else 'green'}]{unexplained}"
        )
    return table


def _differences(title: str, findings: Iterable[Finding]) -> Table:
    table = Table(title=title, show_lines=True)
    table.add_column("program", ratio=3)
    table.add_column("tf.distribute", ratio=2)
    table.add_column("Replicax", ratio=2)
    table.add_column("because", ratio=4)
    for f in findings:
        table.add_row(*map(escape, (f.program.name, show(f.tensorflow), show(f.replicax), f.program.differs or "")))
    return table


def _executors(findings: Iterable[Finding]) -> Table:
    table = Table(title="Where the exact executor may do what the compiled one can't", show_lines=True)
    table.add_column("program", ratio=3)
    table.add_column("compiled", ratio=2)
    table.add_column("exact", ratio=2)
    table.add_column("because", ratio=4)
    for f in findings:
        because = f.program.executors_differ or ""
        table.add_row(*map(escape, (f.program.name, show(f.replicax), show(f.exact), because)))
    return table


def _print_unexplained(console: Console, finding: Finding) -> None:
    program = finding.program
    console.print(f"[bold red]{escape(program.name)}[/]")
    for pair, verdict, reason in (
        ("TensorFlow and Replicax", finding.libraries, program.differs),
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
