"""Measuring peers in turn: all of a case are ready at once, and each trains for a moment, again and again.

A case is a problem on so many replicas. Its processes are started one after the other, so that nothing else runs while
one imports and compiles; then they take turns. Each round does so in new processes, and begins with another peer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.peers.problems import Problem
from benchmarks.peers.process import Side
from benchmarks.peers.roster import REFERENCE, Peer

TOLERANCE = 2e-3
"""How far a peer's loss may be from that of float64 on one device, relative to it."""


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much to measure.

    Attributes:
      rounds: how often each case is measured in new processes.
      turns: how often each peer trains in a round.
      seconds: for how long each time.
    """

    rounds: int = 2
    turns: int = 4
    seconds: float = 0.25


class AnotherComputationError(RuntimeError):
    """A peer computes something else, so that there is nothing to compare."""


def measure(
    peers: Sequence[Peer],
    problem: Problem,
    replicas: int,
    settings: Mapping[str, str],
    effort: Effort,
    said: Callable[[str], object],
) -> dict[str, Any]:
    """Measure one case.

    Args:
      peers: who takes part.
      problem: what they train.
      replicas: on how many replicas.
      settings: the thread setting of each peer, by its name.
      effort: how much to measure.
      said: called with what is done now.

    Raises:
      AnotherComputationError: a peer has another number of parameters, or another loss.
      PeerFailedError: a process ended or said nothing.
    """
    expected = reference(problem)
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(effort.rounds):
        first = number * len(peers) // effort.rounds
        order = [*peers[first:], *peers[:first]]
        rounds.append(_round(order, problem, replicas, settings, effort, said))
        for peer in peers:
            check(peer, problem, rounds[-1][peer.name], expected)
    return {
        "problem": problem.name,
        "replicas": replicas,
        "parameters": problem.parameters,
        "losses": expected,
        "peers": {peer.name: _summary(peer, settings[peer.name], rounds) for peer in peers},
    }


@functools.cache
def reference(problem_: Problem) -> dict[str, float]:
    """The losses of the steps that are checked, of float64 on one device."""
    with Side(REFERENCE, problem_, 1) as side:
        losses: dict[str, float] = side.ask("first")["losses"]
    return losses


def check(peer: Peer, problem: Problem, found: Mapping[str, Any], expected: Mapping[str, float]) -> None:
    """Raise :class:`AnotherComputationError` unless the peer trains this problem."""
    if found["parameters"] != problem.parameters:
        raise AnotherComputationError(
            f"{peer.name} trains {found['parameters']:,} parameters of {problem.name}, expected {problem.parameters:,}"
        )
    for step, loss in found["losses"].items():
        if not math.isclose(loss, expected[step], rel_tol=TOLERANCE):
            raise AnotherComputationError(
                f"{peer.name}'s loss of {problem.name} at step {step} is {loss:.6f}, expected {expected[step]:.6f} to "
                f"within {TOLERANCE:.1%}"
            )


def _round(
    peers: Sequence[Peer],
    problem: Problem,
    replicas: int,
    settings: Mapping[str, str],
    effort: Effort,
    said: Callable[[str], object],
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        sides: dict[str, Side] = {}
        for peer in peers:
            said(f"{problem.name}, {replicas} replicas: {peer.name} begins")
            side = sides[peer.name] = stack.enter_context(Side(peer, problem, replicas, settings[peer.name]))
            found[peer.name] = {**side.ready, **side.ask("first"), "times": [], "processor_times": []}
        for turn in range(effort.turns):
            said(f"{problem.name}, {replicas} replicas: turn {turn + 1} of {effort.turns}")
            for peer in peers:
                answer = sides[peer.name].ask(f"block {effort.seconds}")
                found[peer.name]["times"].append(answer["step_s"])
                found[peer.name]["processor_times"].append(answer["processor_s"])
        for peer in peers:
            found[peer.name] |= sides[peer.name].ask("memory")
    return found


def _summary(peer: Peer, setting: str, rounds: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    mine = [r[peer.name] for r in rounds]
    times = [t for r in mine for t in r["times"]]
    baseline = "replicax_steps" if peer.many else "replicax"
    summary: dict[str, Any] = {
        "threads": setting,
        "step_ms": statistics.median(times) * 1e3,
        "step_ms_95": [t * 1e3 for t in interval(times)],
        "processor_ms": statistics.median(t for r in mine for t in r["processor_times"]) * 1e3,
        "ready_s": min(r["ready_s"] for r in mine),
        "first_s": min(r["first_s"] for r in mine),
        "ten_s": min(r["ten_s"] for r in mine),
        "peak_mb": max(r["peak"] for r in mine) / 1e6,
        "proportional_mb": max(r["proportional"] for r in mine) / 1e6,
        "processes": mine[0]["processes"],
        "losses": mine[-1]["losses"],
        "times_ms": [t * 1e3 for t in times],
    }
    if all(baseline in r for r in rounds):
        ratios = [a / b for a, b in zip(times, (t for r in rounds for t in r[baseline]["times"]), strict=True)]
        summary |= {"over_replicax": statistics.median(ratios), "over_replicax_95": list(interval(ratios))}
    return summary


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the true median lies, with 95% confidence (by order statistics)."""
    ordered, n = sorted(values), len(values)
    margin = round(0.98 * n**0.5)
    return ordered[max(0, n // 2 - margin)], ordered[min(n - 1, n // 2 + margin)]
