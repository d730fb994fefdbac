"""A program that goes on for long: what it has no more is forgotten everywhere."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import replicax
from replicax.parameter_server.worker import step_worker
from tests.parameter_server.thread_actors import coordinator_of

WAIT = 100.0


@pytest.mark.usefixtures("young_heap")
def test_functions_datasets_and_variables_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_worker, "_KEPT_FUNCTIONS", 3)
    strategy = replicax.ParameterServerStrategy(num_workers=1, num_servers=2)

    def adding(v: replicax.Variable, optimizer: replicax.Optimizer) -> Callable[[Any], Any]:
        def step(x: Any) -> None:
            optimizer.apply_gradients([(-jnp.float32(x), v)])

        return lambda iterator: strategy.run(step, args=(next(iterator),))

    with coordinator_of(strategy) as (coordinator, actors):
        cluster = coordinator._cluster
        for number in range(8):  # of each a new one
            with strategy.scope():
                v, optimizer = replicax.Variable(float(number), name="v"), replicax.Optimizer(optax.sgd(1.0, 0.9))
            iterator = iter(coordinator.create_per_worker_dataset(lambda: [1.0] * 4))
            coordinator.schedule(adding(v, optimizer), args=(iterator,))
            coordinator.join(WAIT)
            assert float(v) == number + 1
            del v, optimizer, iterator
            cluster.dispatcher._since_snapshot.clear()
        for number in range(2):  # the dispatcher has the last function until it has another
            gc.collect()
            coordinator.schedule(lambda number: number, args=(number,)).fetch(WAIT)
        worker = actors.of("StepWorker")[0].object
        assert len(worker._functions) <= 3
        assert ([*worker._definitions], [*worker._objects]) == ([("servers", 0)], [])
        assert [len(known) for known in (cluster.home._optimizers, cluster.home._defined)] == [0, 0]
        assert not worker.server_variables.roles
        for server in actors.of("ShardServer"):
            server.call("ready").result(WAIT)  # after what it is to forget
            assert [len(known) for known in (server.object._state.values, server.object._optimizers)] == [0, 0]
            assert len(server.object._state.seen) <= 1  # of the last function that has changed something
        assert [*cluster.home.definitions._all] == [("servers", 0)]


@pytest.mark.usefixtures("young_heap")
def test_what_a_waiting_function_uses_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=1)
    with coordinator_of(strategy) as (coordinator, actors):
        server = actors.of("ShardServer")[0]

        def scheduled_and_gone() -> Any:
            with strategy.scope():
                v, first = replicax.Variable(3.0, name="v"), replicax.Variable(1.0)
            iterator = iter(coordinator.create_per_worker_dataset(lambda: [first.numpy(), 2.0]))
            return coordinator.schedule(lambda v, i: v.numpy() + next(i), args=(v, iterator))

        values = [scheduled_and_gone() for _ in range(5)]
        gc.collect()
        coordinator._cluster.home.define()
        server.kill()  # so that they are run again
        with strategy.scope():
            w = replicax.Variable(2.0, name="w")
        assert float(w) == 2.0  # and if all had been run before, the servers go back now
        assert [float(value.fetch(WAIT)) for value in values] == [4.0] * 5
