"""Functions on one worker: what each sees of its own changes, and what happens when one fails or its process dies."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from tests.parameter_server.thread_actors import ThreadActors, coordinator_of

WAIT = 100.0
MANY = 12


def one_worker(**settings: Any) -> tuple[replicax.ParameterServerStrategy, Any]:
    strategy = replicax.ParameterServerStrategy(num_workers=1, **settings)
    with strategy.scope():
        return strategy, replicax.Variable(np.zeros(2, np.float32), name="v")


def worker_of(actors: ThreadActors) -> Any:
    [actor] = actors.of("StepWorker")
    return actor


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_a_function_sees_what_it_has_changed(executor: Any) -> None:
    strategy, v = one_worker(num_servers=2, variable_partitioner=replicax.variables.FixedShardsPartitioner(2))
    with strategy.scope():
        table = replicax.Variable(np.zeros((4, 2), np.float32), name="table")

    def fn() -> Any:
        options = replicax.RunOptions(executor)
        before = v.numpy()
        for _ in range(3):
            strategy.run(lambda: v.assign_add(jnp.ones(2)), options=options)
        v.assign_add(jnp.ones(2))
        strategy.run(lambda: v.assign(v * 2.0), options=options)
        strategy.run(lambda: table.assign_add(jnp.ones((4, 2)) * v[0]), options=options)
        return before, v.numpy(), table[np.array([1, 3])], table.numpy()

    with coordinator_of(strategy) as (coordinator, _):
        expected = np.zeros(2, np.float32)
        total = 0.0
        for value in [coordinator.schedule(fn) for _ in range(MANY)]:
            before, after, rows, whole = value.fetch(WAIT)
            assert after.tolist() == ((before + 4) * 2).tolist()
            total += after[0]
            assert rows.tolist() == [[total, total]] * 2
            assert whole.tolist() == [[total, total]] * 4
            expected = (expected + 4) * 2
        coordinator.join(WAIT)
        assert v.numpy().tolist() == expected.tolist()


def test_replicas_that_take_turns_send_all_that_they_have_added() -> None:
    """In debug mode a collective switches from one replica to the other in the middle of the step."""
    strategy, v = one_worker(devices_per_worker=2)

    def step() -> Any:
        v.assign_add(jnp.ones(2))
        before = v.value
        total = replicax.get_replica_context().all_reduce("sum", v[0])
        v.assign_add(jnp.full(2, total))
        return before

    def debugged() -> Any:
        with replicax.debug():
            return strategy.run(step)

    with coordinator_of(strategy) as (coordinator, _):
        v.assign(np.full(2, 4, np.float32))
        assert coordinator.schedule(debugged).fetch(WAIT).tolist() == [5, 5]
        assert v.numpy().tolist() == [15, 15]
        assert coordinator.schedule(debugged).fetch(WAIT).tolist() == [16, 16]
        assert v.numpy().tolist() == [48, 48]


def test_functions_that_wait_are_not_run_after_an_error() -> None:
    strategy, v = one_worker()

    def fn(number: int) -> None:
        if number == 5:
            time.sleep(0.05)
            raise KeyError("the fifth")
        strategy.run(lambda: v.assign_add(jnp.ones(2)))

    with coordinator_of(strategy) as (coordinator, _):
        coordinator.schedule(fn, args=(0,)).fetch(WAIT)
        values = []
        for number in range(1, MANY):
            try:
                values.append(coordinator.schedule(fn, args=(number,)))
            except replicax.errors.WorkerError:
                break
        else:
            with pytest.raises(replicax.errors.WorkerError, match="the fifth"):
                coordinator.join(WAIT)
        coordinator.join(WAIT)
        assert v.numpy().tolist() == [5, 5]
        for value in values[5:]:
            with pytest.raises(replicax.errors.WorkerError, match=r"was not run: .*the fifth"):
                value.fetch(WAIT)
        coordinator.schedule(fn, args=(0,)).fetch(WAIT)
        assert v.numpy().tolist() == [6, 6]


@pytest.mark.parametrize("in_step", [True, False])
def test_a_copy_that_a_function_has_written_is_no_version_of_the_servers(in_step: bool) -> None:
    """A worker runs again what another has done: its own copy has the change twice, and must not be kept."""
    strategy, v = one_worker()

    def fn() -> Any:
        if not in_step:
            return v.assign(v.numpy() + 1).numpy()
        return strategy.run(lambda: v.assign_add(jnp.ones(2)).read_value())

    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(fn).fetch(WAIT)
        coordinator.join(WAIT)
        worker = worker_of(actors)
        worker.after = lambda method, args: worker.kill()  # the servers have made its change, and nobody knows
        coordinator.schedule(fn).fetch(WAIT)
        assert coordinator.schedule(lambda: v.numpy()).fetch(WAIT).tolist() == [2, 2]
        assert coordinator.schedule(fn).fetch(WAIT).tolist() == [3, 3]


def test_a_worker_that_has_too_few_devices_is_an_error() -> None:
    strategy, _ = one_worker(devices_per_worker=99)
    too_few = pytest.raises(
        replicax.errors.WorkerError, match=r"worker 0 has (\d+) cpu device.* is 99: pass devices_per_worker=\1"
    )
    with coordinator_of(strategy) as (coordinator, _), too_few:
        coordinator.schedule(lambda: 1).fetch(WAIT)


class Cancelled(BaseException):
    """An error that is no ``Exception``, of a class that other processes can't import."""


Cancelled.__module__ = "__main__"


@pytest.mark.parametrize("kind", [asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit, Cancelled])
def test_any_error_of_a_function_is_raised_and_the_next_one_runs(kind: type[BaseException]) -> None:
    strategy, _ = one_worker()

    def fails() -> None:
        raise kind("enough")

    with coordinator_of(strategy) as (coordinator, _):
        coordinator.schedule(fails)
        with pytest.raises(replicax.errors.WorkerError, match=f"{kind.__name__}: enough") as raised:
            coordinator.join(WAIT)
        assert type(raised.value.__cause__) is kind
        assert coordinator.schedule(lambda: 7).fetch(WAIT) == 7


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
@pytest.mark.parametrize("assigns_first", [True, False])
def test_a_step_does_not_assign_a_variable_that_its_optimizer_changes(executor: Any, assigns_first: bool) -> None:
    strategy, v = one_worker()
    with strategy.scope():
        optimizer = replicax.Optimizer(optax.sgd(1.0))

    def step() -> None:
        if assigns_first:
            v.assign(v * 0.5)
        optimizer.apply_gradients([(jnp.ones(2), v)])
        if not assigns_first:
            v.assign(jnp.clip(v.value, -1.0, 1.0))

    with coordinator_of(strategy) as (coordinator, _):
        coordinator.schedule(lambda: strategy.run(step, options=replicax.RunOptions(executor)))
        with pytest.raises(replicax.errors.WorkerError, match="a step that also changes it by apply_gradients"):
            coordinator.join(WAIT)
        assert v.numpy().tolist() == [0.0, 0.0]
