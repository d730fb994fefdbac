"""``python -m tests.oracle``: run every program on TensorFlow and on Replicax, and say where they differ."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from tests.oracle.comparing import Finding, Verdict
from tests.oracle.programs import PROGRAMS
from tests.oracle.report import markdown, print_report, show
from tests.oracle.running import DidNotStartError, run_side
from tests.oracle.side import SIDES


def main() -> int:
    """Run the programs; the exit status is 0 if every difference is explained."""
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__)
    parser.add_argument("-k", metavar="TEXT", default="", help="only programs whose name contains TEXT")
    parser.add_argument("--all", action="store_true", help="print what every program did, too")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write what differs to FILE, too")
    arguments = parser.parse_args()
    programs = [program for program in PROGRAMS if arguments.k in program.name]
    if not programs:
        parser.error(f"no program's name contains {arguments.k!r}")

    console = Console()
    with Progress(console=console, transient=True) as progress, ThreadPoolExecutor(2) as pool:
        running = []
        for side in SIDES:
            task = progress.add_task(side, total=len(programs))
            running.append(pool.submit(run_side, side, programs, partial(progress.advance, task)))
        try:
            tensorflow, replicax, exact = (future.result() for future in running)
        except DidNotStartError as error:
            console.print(str(error), markup=False, highlight=False)
            return 2

    findings = [Finding(p, tensorflow[p.name], replicax[p.name], exact[p.name]) for p in programs]
    if arguments.all:
        for f in findings:
            console.print(
                f"{f.program.name}\n  {show(f.tensorflow)}\n  {show(f.replicax)}", highlight=False, markup=False
            )
    print_report(console, findings)
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown(findings))
    return int(any(f.overall is Verdict.UNEXPLAINED for f in findings))


if __name__ == "__main__":
    sys.exit(main())
