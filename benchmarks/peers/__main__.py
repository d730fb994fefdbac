"""``python -m benchmarks.peers``: measure Replicax and its peers, and write the table, the figures and the picture."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks.peers import report, threads
from benchmarks.peers.measuring import AnotherComputationError, Effort, measure
from benchmarks.peers.problems import MAKERS, problem
from benchmarks.peers.process import PeerFailedError
from benchmarks.peers.roster import PEERS, REPLICAS, Peer, taking_part

QUICK = Effort(rounds=1, turns=2, seconds=0.1)


def main() -> int:
    """Measure; the exit status is 0 if every peer trains the same."""
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 140)
    if options.report:
        report.write(report.read())
        return 0
    peers: Sequence[Peer] = [peer for peer in PEERS if not options.peers or peer.name in options.peers]
    numbers = options.replicas or (REPLICAS[-1:] if options.quick else REPLICAS)
    cases = [(problem(name), replicas) for replicas in numbers for name in options.problems]
    begun = time.monotonic()

    def said(what: str) -> None:
        console.print(f"{time.monotonic() - begun:5.0f} s  {what}", highlight=False)

    try:
        if options.tune:
            for case, replicas in cases:
                console.print(threads.tune(taking_part(peers, replicas), case, replicas, said))
            return 0
        effort = QUICK if options.quick else Effort()
        found: list[dict[str, Any]] = []
        for case, replicas in cases:
            here = taking_part(peers, replicas)
            found.append(measure(here, case, replicas, threads.chosen(here, replicas, case), effort, said))
            said(", ".join(f"{name} {p['step_ms']:.2f} ms" for name, p in found[-1]["peers"].items()))
    except (AnotherComputationError, PeerFailedError) as error:
        console.print(str(error), markup=False, highlight=False)
        return 1
    results = report.results(found, effort, peers)
    report.show(console, results)
    complete = len(peers) == len(PEERS) and len(cases) == len(MAKERS) * len(REPLICAS)
    if complete and not options.quick:
        report.write(results)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="on 8 replicas, and noisier; writes nothing")
    parser.add_argument("--tune", action="store_true", help="find out how many threads are best; writes threads.json")
    parser.add_argument("--report", action="store_true", help="table and picture anew from the last figures")
    parser.add_argument("--peers", nargs="+", choices=[peer.name for peer in PEERS], help="only these; writes nothing")
    parser.add_argument("--problems", nargs="+", choices=list(MAKERS), default=list(MAKERS), help="only these")
    parser.add_argument("--replicas", nargs="+", type=int, choices=REPLICAS, help="on so many")
    return parser.parse_args()


if __name__ == "__main__":
    os.chdir(report.ROOT)
    sys.exit(main())
