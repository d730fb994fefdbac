"""Bounded staleness: how old the variables may be that a change was computed from."""

from __future__ import annotations

import time

import pytest

import replicax
from tests.parameter_server.thread_actors import coordinator_of


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


def test_what_is_based_on_nothing_is_not_stale() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=1)
    with strategy.scope():
        v = replicax.Variable(0.0, name="v")

    def add() -> None:
        v.assign_add(1.0)  # without reading it

    with coordinator_of(strategy) as (coordinator, _):
        for _ in range(20):
            coordinator.schedule(add)
        report = coordinator.join(100)
    assert float(v) == 20.0
    assert report.staleness_p99 == 0
