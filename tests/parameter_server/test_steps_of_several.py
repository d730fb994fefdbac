"""A step of several functions: what is changed is changed when all have ended, and by those that change it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import replicax
from tests.parameter_server.regression import batches, in_parts, mirrored, regression
from tests.parameter_server.thread_actors import coordinator_of

WAIT = 100.0


def strategy_of(workers: int = 2) -> replicax.ParameterServerStrategy:
    return replicax.ParameterServerStrategy(
        num_workers=workers,
        num_servers=2,
        mode="sync",
        variable_partitioner=replicax.variables.FixedShardsPartitioner(2),
    )


def test_what_some_functions_push_less_often_counts_when_the_step_has_ended() -> None:
    strategy = strategy_of()
    with strategy.scope():
        total = replicax.Variable(np.zeros(4, np.float32), name="total", aggregation="sum")

    def add(times: int) -> None:
        for _ in range(times):
            total.assign_add(np.ones(4, np.float32))

    with coordinator_of(strategy) as (coordinator, _):
        expected = 0
        for times in [(0, 1), (2, 1), (0, 0), (3, 0), (1, 1)]:
            for one in times:
                coordinator.schedule(add, args=(one,))
            coordinator.join(WAIT)
            expected += sum(times)
            assert total.numpy().tolist() == [expected] * 4


def test_a_value_is_assigned_after_the_step_that_came_before() -> None:
    """The servers wait with a step's update until they hear that it is whole; an assignment may be the first to say."""
    strategy = strategy_of()
    with strategy.scope():
        total = replicax.Variable(np.zeros(4, np.float32), name="total", aggregation="sum")

    with coordinator_of(strategy) as (coordinator, _):
        for _ in range(2):
            coordinator.schedule(lambda: total.assign_add(np.ones(4, np.float32)))
        coordinator.join(WAIT)
        total.assign(np.full(4, 7, np.float32))
        assert total.numpy().tolist() == [7] * 4


def test_a_function_that_reads_what_it_has_changed_is_told() -> None:
    strategy = strategy_of()
    model = regression(strategy)
    [batch] = batches(1)

    def two_steps(*part: Any) -> None:
        strategy.run(model.step, args=part)
        strategy.run(model.step, args=part)

    def reads_rows() -> Any:
        model.w.assign_add(np.ones((5, 2), np.float32))
        return model.w[np.array([0])]

    def assigns() -> Any:
        model.w.assign(np.zeros((5, 2), np.float32))
        return model.w.numpy()

    def scheduled(coordinator: replicax.ClusterCoordinator, fn: Any, parts: Any) -> None:
        for part in parts:
            coordinator.schedule(fn, args=part)
        coordinator.join(WAIT)

    with coordinator_of(strategy) as (coordinator, _):
        for fn, args in [(two_steps, batch), (reads_rows, ()), (assigns, ())]:
            with pytest.raises(replicax.errors.WorkerError, match=r"has changed variable .* and now reads it"):
                scheduled(coordinator, fn, in_parts(batch, 2) if args else [(), ()])
        assert int(model.iterations) == 0  # no part of a step that has failed
        expected = regression(replicax.MirroredStrategy(["cpu:0"])).w.numpy().tolist()
        seen = coordinator.fetch([coordinator.schedule(lambda: model.w.numpy()) for _ in range(2)])
        assert [w.tolist() for w in (model.w.numpy(), *seen)] == [expected] * 3


@pytest.mark.parametrize("server", [0, 1])
def test_a_worker_that_dies_between_two_servers_has_the_same_values_again(server: int) -> None:
    """Its function is run again on the values before the step, so losses and results are those without any fault."""
    steps = 6
    strategy = strategy_of()
    model = regression(strategy)

    def train(*part: Any) -> Any:
        return strategy.run(model.step, args=part)

    def run(faults: bool) -> list[float]:
        with coordinator_of(strategy) as (coordinator, actors):
            if faults:
                _lose_pushes(actors, server)
            losses = []
            for batch in batches(steps):
                losses += [coordinator.schedule(train, args=part) for part in in_parts(batch, 2)]
            report = coordinator.join(WAIT)
            assert bool(report.workers_lost) is faults
            return [float(loss) for loss in coordinator.fetch(losses)]

    initial = [v.numpy() for v in (model.w, model.b, model.iterations)]
    with_faults = run(True)
    found = model.values
    assert int(model.iterations) == steps
    for value, expected in zip(found, mirrored(2, steps).values, strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-6, rtol=1e-6)
    for variable, value in zip((model.w, model.b, model.iterations), initial, strict=True):
        variable.assign(value)
    model.optimizer.reset()
    assert run(False) == with_faults


def _lose_pushes(actors: Any, server: int) -> None:
    """Now and then a push reaches one server, and not the other: the worker has died in between."""
    from replicax.parameter_server.actors import ActorDiedError

    pushes = 0

    def die(method: str, args: Any) -> None:
        nonlocal pushes
        if method != "push":
            return
        pushes += 1
        if pushes in (2, 5, 8):
            actors.of("StepWorker")[args[0].function % 2].kill()
            raise ActorDiedError("the connection is gone")

    actors.of("ShardServer")[server].before = die
