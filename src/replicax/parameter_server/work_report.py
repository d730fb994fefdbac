"""The work report: the number of functions of a time segment, their rate, and the staleness of their variables."""

from __future__ import annotations

import collections
import dataclasses
import time

import numpy as np


@dataclasses.dataclass(frozen=True)
class WorkReport:
    """The result of :meth:`ClusterCoordinator.join`: statistics of the functions since the last one.

    Attributes:
      functions: the number of functions that were run.
      seconds: since the first was scheduled.
      rate: functions per second.
      by_worker: the number of functions of each worker, by its number.
      staleness_p50: of their pushes; the *staleness* of a push is the number of updates that a server made between the
        time when the worker read the variables and the time when the server applied this push. The median.
      staleness_p99: the 99th percentile.
      workers_lost: the number of workers that died and were replaced.

    >>> import replicax
    >>> report = replicax.parameter_server.WorkReport(
    ...     120, 60.0, 2.0, {0: 70, 1: 50}, staleness_p50=1, staleness_p99=2, workers_lost=0
    ... )
    >>> sum(report.by_worker.values()) == report.functions, report.rate == report.functions / report.seconds
    (True, True)
    """

    functions: int
    seconds: float
    rate: float
    by_worker: dict[int, int]
    staleness_p50: float
    staleness_p99: float
    workers_lost: int


@dataclasses.dataclass
class WorkLog:
    """Collects the statistics for a report."""

    since: float | None = None  # when the first function was scheduled
    functions: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    staleness: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    deaths: int = 0

    def report(self) -> WorkReport:
        """The report until now."""
        seconds = 0.0 if self.since is None else time.monotonic() - self.since
        functions = self.functions.total()
        p50, p99 = np.percentile(list(self.staleness.elements()) or [0], (50, 99)).tolist()
        return WorkReport(
            functions,
            seconds,
            functions / seconds if seconds else 0.0,
            dict(sorted(self.functions.items())),
            p50,
            p99,
            self.deaths,
        )
