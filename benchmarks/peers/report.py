"""What was measured, as a table on the screen, as ``results/peers.json``, and on the page of peers."""

from __future__ import annotations

import json
import os
import platform
import re
import textwrap
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.measuring import Effort
from benchmarks.peers.problems import MAKERS, problem
from benchmarks.peers.roster import BY_NAME, REPLICAS, Peer

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "peers.json"
PICTURE = ROOT / "docs" / "peers.svg"  # where the site has its pictures
PAGE = Path(__file__).with_name("README.md")
BEGIN, END = (
    "<!-- written by `python -m benchmarks.peers`: begin -->",
    "<!-- written by `python -m benchmarks.peers`: end -->",
)


def results(cases: Sequence[dict[str, Any]], effort: Effort, peers: Sequence[Peer]) -> dict[str, Any]:
    """All that is known of a measurement."""
    packages = sorted({package for peer in peers for package in peer.packages} | {"numpy"})
    return {
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "architecture": platform.machine(),
            "python": platform.python_version(),
            **{package: metadata.version(package) for package in packages},
        },
        "rounds": effort.rounds,
        "turns": effort.turns,
        "seconds": effort.seconds,
        "cases": list(cases),
    }


def read() -> dict[str, Any]:
    """The last measurement that was written."""
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def write(found: dict[str, Any]) -> None:
    """Write the figures, the picture, and the table on the page."""
    from benchmarks.peers.picture import draw

    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    draw(found, PICTURE)
    page = PAGE.read_text()
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise ValueError(f"{PAGE} has no place for the table: expected it once between {BEGIN!r} and {END!r}")
    text = f"{BEGIN}\n\n{markdown(found)}\n{END}"
    PAGE.write_text(pattern.sub(lambda _: text, page))
    for path in (RESULTS, PICTURE, PAGE):
        print(f"written: {path.relative_to(ROOT)}")


# --- tables ---------------------------------------------------------------------------------------------


def show(console: Console, found: dict[str, Any]) -> None:
    """Print all tables, and who is ahead."""
    for title, rows in _tables(found):
        header, *body = rows
        table = Table(title=title)
        for i, name in enumerate(header):
            table.add_column(name.replace("**", ""), justify="right" if i else "left")
        for row in body:
            table.add_row(*(cell.replace("**", "") for cell in row))
        console.print(table)
    for line in ahead(found):
        console.print(line, highlight=False)


def markdown(found: dict[str, Any]) -> str:
    """The tables for the page."""
    machine = found["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in machine.items() if k not in ("cores", "architecture"))
    parts = [textwrap.fill(f"{machine['cores']} cores ({machine['architecture']}); {versions}.", 120)]
    for title, rows in _tables(found):
        header, *body = rows
        lines = [header, ["---", *["---:"] * (len(header) - 1)], *body]
        parts.append(f"{title}:\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in lines))
    parts.append(f"![Time of a step, by model and number of replicas](../../docs/{PICTURE.name})")
    if lines := list(ahead(found)):
        parts.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


def ahead(found: dict[str, Any]) -> Iterator[str]:
    """A sentence for each peer that is quicker than Replicax beyond doubt, by the interval of the ratio."""
    for case in found["cases"]:
        for name, figures in case["peers"].items():
            low, high = figures.get("over_replicax_95", (1.0, 1.0))
            if high < 1 and not name.startswith("replicax"):
                what = f"{case['problem']} on {case['replicas']} replicas"
                ratio = figures["over_replicax"]
                yield f"{BY_NAME[name].title} is ahead with the {what}: {ratio:.2f} of the time ({low:.2f}–{high:.2f})"


def _tables(found: dict[str, Any]) -> Iterator[tuple[str, list[list[str]]]]:
    problems = [name for name in MAKERS if any(case["problem"] == name for case in found["cases"])]
    header = ["", *(problem(name).title for name in problems)]
    for replicas in REPLICAS:
        cases = {case["problem"]: case["peers"] for case in found["cases"] if case["replicas"] == replicas}
        if not cases:
            continue
        names = [name for name in BY_NAME if any(name in peers for peers in cases.values())]
        for title, cell in (
            (f"{replicas} replicas: a step in ms, and as a multiple of Replicax's (95%)", _time),
            (f"{replicas} replicas: the first ten steps with imports in s, peak of the memory in MB", _start),
        ):
            rows = []
            for name in names:
                own = f"**{BY_NAME[name].title}**" if name.startswith("replicax") else BY_NAME[name].title
                cells = (cell(name, cases[p][name]) if p in cases else "" for p in problems)
                rows.append([own, *cells])
            yield title, [header, *rows]


def _time(name: str, figures: dict[str, Any]) -> str:
    text = f"{figures['step_ms']:.2f}"
    if "over_replicax" in figures and name not in ("replicax", "replicax_steps"):
        low, high = figures["over_replicax_95"]
        text += f" · {figures['over_replicax']:.2f}× ({low:.2f}–{high:.2f})"
    return text


def _start(name: str, figures: dict[str, Any]) -> str:
    text = f"{figures['ready_s'] + figures['ten_s']:.1f} s · {figures['peak_mb']:,.0f} MB"
    if figures["processes"] > 1:
        text += f" (shared pages once: {figures['proportional_mb']:,.0f})"
    return text
