"""Bounded staleness: how old the variables may be that a change was computed from."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import replicax
from tests.parameter_server.thread_actors import coordinator_of, wait_until_ready


@pytest.mark.parametrize("bound", [0, 1, 2, None])
def test_it_is_measured_and_bounded(bound: int | None) -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=4, max_staleness=bound)
    with strategy.scope():
        v = replicax.Variable(0.0, name="v")

    def fn(number: int) -> None:
        if number % 4 == 0:
            time.sleep(0.01)  # some take longer
        strategy.run(lambda: v.assign_add(1.0))

    with coordinator_of(strategy) as (coordinator, _):
        for number in range(60):
            coordinator.schedule(fn, args=(number,))
        report = coordinator.join(100)
    assert float(v) == 60.0
    assert report.staleness_p50 <= report.staleness_p99
    if bound is not None:
        assert report.staleness_p99 <= bound
    if bound == 0:
        assert report.staleness_p99 == 0


_hold, _holds = threading.Event(), threading.Event()
"""What a function waits for: workers are threads of this process."""


@pytest.mark.parametrize("reads", ["the value", "rows"])
def test_a_report_has_what_each_worker_did_and_what_was_stale(reads: str) -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=2)
    with strategy.scope():
        v = replicax.Variable(np.zeros(3, np.float32), name="v")

    def add_later(others: int) -> None:
        from tests.parameter_server.test_staleness import _hold, _holds

        if others:
            v.numpy() if reads == "the value" else v[np.array([1])]
            _holds.set()
            _hold.wait(100)
        v.assign_add(np.ones(3, np.float32))  # what is based on nothing is not stale

    _hold.clear()
    _holds.clear()
    with coordinator_of(strategy) as (coordinator, _):
        coordinator.schedule(add_later, args=(0,)).fetch(100)
        coordinator.join(100)
        wait_until_ready(coordinator)
        coordinator.schedule(add_later, args=(9,))
        assert _holds.wait(100)
        began = time.monotonic()
        for _ in range(9):
            coordinator.schedule(add_later, args=(0,)).fetch(100)
        waited = time.monotonic() - began
        _hold.set()
        report = coordinator.join(100)
    assert sorted(report.by_worker.values()) == [1, 9]
    assert (report.staleness_p50, report.staleness_p99) == (0, pytest.approx(0.91 * 9))  # of nine that are 0, and a 9
    assert report.seconds >= waited
    assert report.rate == report.functions / report.seconds
