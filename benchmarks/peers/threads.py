"""Which number of threads is best for each peer, found by trying, and kept in ``threads.json``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.peers.problems import Problem
from benchmarks.peers.process import Side
from benchmarks.peers.roster import DEFAULT, Peer, settings

PATH = Path(__file__).with_name("threads.json")
TURNS = 4


def best(replicas: int, problem: Problem) -> dict[str, str]:
    """The setting of each peer that was tuned, by its name."""
    found: dict[str, dict[str, str]] = json.loads(PATH.read_text()) if PATH.exists() else {}
    return found.get(_key(replicas, problem), {})


def chosen(peers: Sequence[Peer], replicas: int, problem: Problem) -> dict[str, str]:
    """The setting of each of ``peers``: the library's own choice where none was tuned, or it does not exist here."""
    kept = best(replicas, problem)
    return {p.name: kept[p.name] if kept.get(p.name) in settings(p) else DEFAULT for p in peers}


def tune(peers: Sequence[Peer], problem: Problem, replicas: int, said: Callable[[str], object]) -> dict[str, str]:
    """Try all settings of each peer in turn, keep the quickest in ``threads.json``, and return them."""
    quickest: dict[str, str] = {}
    for peer in peers:
        sides: dict[str, Side] = {}
        try:
            for setting in settings(peer):
                said(f"{problem.name}, {replicas} replicas: {peer.name} with {setting} threads")
                sides[setting] = Side(peer, problem, replicas, setting)
                sides[setting].ask("first")
            times: dict[str, list[float]] = {setting: [] for setting in sides}
            for _ in range(TURNS):
                for setting, side in sides.items():
                    times[setting].append(side.ask("block 0.2")["step_s"])
        finally:
            for side in sides.values():
                side.close()
        quickest[peer.name] = min(times, key=lambda setting: statistics.median(times[setting]))
        said(", ".join(f"{name}: {statistics.median(mine) * 1e3:.2f} ms" for name, mine in times.items()))
    kept = json.loads(PATH.read_text()) if PATH.exists() else {}
    kept[_key(replicas, problem)] = {**best(replicas, problem), **quickest}
    PATH.write_text(json.dumps(kept, indent=2) + "\n")
    return quickest


def _key(replicas: int, problem: Problem) -> str:
    return f"{problem.name}, {replicas} replicas"
