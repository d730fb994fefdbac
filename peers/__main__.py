"""``python -m peers``: measure Replicax and its peers, and write the table, the figures and the picture."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from peers import report, threads
from peers.measuring import AnotherComputationError, Effort, measure
from peers.problems import MAKERS, problem
from peers.process import PeerFailedError
from peers.roster import PEERS, REPLICAS, Peer

QUICK = Effort(rounds=1, turns=3, seconds=0.15)


def main() -> int:
    """Measure; the exit status is 0 if every peer trains the same."""
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 140)
    if options.report:
        report.write(report.read())
        return 0
    peers: Sequence[Peer] = [peer for peer in PEERS if not options.peers or peer.name in options.peers]
    cases = [(problem(name), replicas) for name in options.problems for replicas in options.replicas]
    begun = time.monotonic()

    def said(what: str) -> None:
        console.print(f"{time.monotonic() - begun:5.0f} s  {what}", highlight=False)

    try:
        if options.tune:
            for case, replicas in cases:
                console.print(threads.tune(peers, case, replicas, said))
            return 0
        effort = QUICK if options.quick else Effort()
        found: list[dict[str, Any]] = []
        for case, replicas in cases:
            settings = threads.chosen(peers, replicas, case)
            found.append(measure(peers, case, replicas, settings, effort, said))
            said(", ".join(f"{name} {p['step_ms']:.2f} ms" for name, p in found[-1]["peers"].items()))
    except (AnotherComputationError, PeerFailedError) as error:
        console.print(str(error), markup=False, highlight=False)
        return 1
    results = report.results(found, effort, peers)
    report.show(console, results)
    complete = len(peers) == len(PEERS) and len(cases) == len(MAKERS) * len(REPLICAS)
    if options.write or (complete and not options.quick):
        if not complete:
            console.print("not written: only a part was measured")
            return 1
        report.write(results)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="about half of the time, and noisier; writes nothing")
    parser.add_argument("--tune", action="store_true", help="find out how many threads are best; writes threads.json")
    parser.add_argument("--report", action="store_true", help="table and picture anew from the last figures")
    parser.add_argument("--write", action="store_true", help="with --quick: write what was found all the same")
    parser.add_argument("--peers", nargs="+", choices=[peer.name for peer in PEERS], help="only these; writes nothing")
    parser.add_argument("--problems", nargs="+", choices=list(MAKERS), default=list(MAKERS), help="only these")
    parser.add_argument("--replicas", nargs="+", type=int, choices=REPLICAS, default=list(REPLICAS), help="on so many")
    return parser.parse_args()


if __name__ == "__main__":
    os.chdir(report.ROOT)
    sys.exit(main())
