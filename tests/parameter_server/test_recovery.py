"""Servers die: others take their place, all go back to one version, and what was run since is run again."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import replicax
from replicax.parameter_server import recovery
from tests.parameter_server.regression import batches, in_parts, mirrored, regression
from tests.parameter_server.thread_actors import ThreadActors, coordinator_of

WAIT = 100.0


def dying(actors: ThreadActors, rng: random.Random, chance: float, most: int) -> list[str]:
    """From now on processes of servers die at some of their calls; returns the list of these calls, which grows."""
    deaths: list[str] = []

    def mortal(actor: Any) -> None:
        def maybe_die(method: str, args: Any) -> None:
            if method in ("push", "pull", "snapshot") and len(deaths) < most and rng.random() < chance:
                deaths.append(method)
                actor.kill()

        if actor.kind.__name__ == "ShardServer":
            actor.before, actor.after = (
                (maybe_die, lambda *_: None) if rng.random() < 0.5 else (lambda *_: None, maybe_die)
            )

    start = actors.start

    def start_mortal(kind: type, *args: Any, env: Any) -> Any:
        actor = start(kind, *args, env=env)
        mortal(actor)
        return actor

    actors.start = start_mortal
    for actor in actors.actors:
        mortal(actor)
    return deaths


def spare(actors: ThreadActors) -> None:
    """No more deaths: after the end nothing is run again."""
    for actor in actors.actors:
        actor.before = actor.after = lambda *_: None


@pytest.fixture(autouse=True)
def many_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_FUNCTIONS", 6)
    monkeypatch.setattr(recovery, "_SHARE", 1e9)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_synchronous_run_has_the_result_of_one_without_faults(seed: int) -> None:
    steps = 12
    strategy = replicax.ParameterServerStrategy(
        num_workers=2, num_servers=2, mode="sync", variable_partitioner=replicax.FixedShardsPartitioner(2)
    )
    model = regression(strategy)

    def train(*part: Any) -> Any:
        return strategy.run(model.step, args=part)

    with coordinator_of(strategy) as (coordinator, actors):
        deaths = dying(actors, random.Random(seed), 0.05, most=5)
        results = []
        for batch in batches(steps):
            results += [coordinator.schedule(train, args=part) for part in in_parts(batch, 2)]
        coordinator.join(timeout_seconds=WAIT)
        values = model.values
        assert int(model.iterations) == steps
        assert all(np.isfinite(loss) for loss in coordinator.fetch(results))
        spare(actors)
    assert len(deaths) >= 2
    for found, expected in zip(values, mirrored(2, steps).values, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6, rtol=1e-6)


def test_an_asynchronous_run_counts_each_function_once() -> None:
    strategy = replicax.ParameterServerStrategy(
        num_workers=3, num_servers=3, variable_partitioner=replicax.FixedShardsPartitioner(3)
    )
    with strategy.scope():
        iterations = replicax.Variable(0, name="iterations")
        parts = replicax.Variable(np.zeros(6, np.float32), name="parts")

    def step() -> None:
        iterations.assign_add(1)
        parts.assign_add(np.ones(6, np.float32))

    with coordinator_of(strategy) as (coordinator, actors):
        deaths = dying(actors, random.Random(3), 0.05, most=10)
        for total in (20, 40, 60):
            for _ in range(20):
                coordinator.schedule(lambda: strategy.run(step))
            coordinator.join(WAIT)
            assert (int(iterations), parts.numpy().tolist()) == (total, [total] * 6)
            parts.assign_add(np.zeros(6, np.float32))  # by the program: another snapshot
        spare(actors)
    assert len(deaths) >= 5


def test_what_the_program_assigns_is_not_lost() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=1, num_servers=2)
    with strategy.scope():
        v, w = replicax.Variable(1.0, name="v"), replicax.Variable(np.zeros(2, np.float32), name="w")

    def step() -> None:
        v.assign_add(1.0)
        w.assign_add(np.ones(2, np.float32))

    def add() -> None:
        strategy.run(step)

    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(add)
        coordinator.join(WAIT)
        v.assign(10.0)
        for server in actors.of("ShardServer"):
            server.kill()
        assert float(v) == 10.0
        assert w.numpy().tolist() == [1.0, 1.0]
        coordinator.schedule(add)
        coordinator.join(WAIT)
        assert (float(v), w.numpy().tolist()) == (11.0, [2.0, 2.0])


def test_servers_that_always_die_are_an_error() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=1)
    with strategy.scope():
        v = replicax.Variable(1.0, name="v")
    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(lambda: strategy.run(lambda: v.assign_add(1.0)))
        coordinator.join(WAIT)
        dying(actors, random.Random(0), 1.0, most=1000)
        coordinator.schedule(lambda: strategy.run(lambda: v.assign_add(1.0)))
        with pytest.raises(replicax.WorkerError, match=r"servers can't go on: .*Restore .* from a checkpoint"):
            coordinator.join(WAIT)
        with pytest.raises(replicax.WorkerError, match="values that this program has read last"):
            coordinator.close()
