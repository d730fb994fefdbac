from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from tests.conftest import strategy_of

DATA = np.random.default_rng(5).normal(size=(4, 8, 3)).astype(np.float32)
EXECUTORS = ["compiled", "per_replica"]


def central(devices: int, per_device: int = 1) -> replicax.CentralStorageStrategy:
    names = [f"cpu:{i}" for i in range(devices)]
    return replicax.CentralStorageStrategy(names, "cpu:7", num_replicas=devices * per_device)


def train(strategy: replicax.Strategy, executor: str = "compiled") -> list[replicax.Variable]:
    with strategy.scope():
        w = replicax.Variable(jnp.zeros((3, 2)), name="w")
        seen = replicax.Variable(0, name="seen", synchronization="on_read", aggregation="sum")
        optimizer = replicax.Optimizer(optax.sgd(0.1, momentum=0.9))

    def step(x):
        seen.assign_add(x.shape[0])
        _, grads = replicax.value_and_grad(
            lambda: replicax.compute_average_loss(jnp.square(x @ w - 1.0).sum(-1)), [w]
        )()
        optimizer.apply_gradients(zip(grads, [w], strict=True))

    for batch in strategy.distribute_dataset(DATA):
        strategy.run(step, args=(batch,), options=replicax.RunOptions(executor))
    return [w, *optimizer.variables, seen]


@pytest.mark.covering(1)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("devices", "per_device"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_training_is_the_same_and_variables_stay_at_home(devices: int, per_device: int, executor: str) -> None:
    found = train(central(devices, per_device), executor)
    for mine, theirs in zip(found, train(strategy_of(1)), strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6)
    for v in found[:-1]:
        assert v.slot.array.devices() == {jax.devices()[7]}
    assert len(found[-1].slot.array.devices()) == devices  # each replica's own count


def test_the_lower_level_knows_where_variables_are() -> None:
    strategy = central(2)
    home = jax.devices()[7]
    with strategy.scope():
        v = replicax.Variable(1.0, name="v")
        assert strategy.extended.parameter_devices == (home,)
        assert strategy.extended.worker_devices == tuple(jax.devices()[:2])
        where = strategy.extended.non_slot_devices([v])
        assert strategy.extended.update_non_slot(where, lambda: v.assign_add(1.0), group=False) == [v]
        with strategy.extended.colocate_vars_with(v):
            slot = replicax.Variable(0.0)
    assert slot.slot.array.devices() == v.slot.array.devices() == {home}


def test_the_host_is_the_default() -> None:
    assert replicax.CentralStorageStrategy(["cpu:3"]).extended.parameter_devices == (jax.devices("cpu")[0],)


def test_a_home_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"there is no device 'cpu:99'; available: .*use_cpu_devices"):
        replicax.CentralStorageStrategy(["cpu:0"], "cpu:99")


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_split_variable_has_its_slots_in_pieces(executor: str) -> None:
    strategy = central(2)
    with strategy.scope():
        split, plain = replicax.variables.ShardedVariable(jnp.ones(5)), replicax.Variable(jnp.ones(3))
        optimizer = replicax.Optimizer(optax.sgd(0.5, momentum=0.9))

    def step():
        optimizer.apply_gradients([(jnp.ones(5), split), (jnp.ones(3), plain)])

    strategy.run(step, options=replicax.RunOptions(executor))
    assert split.numpy().tolist() == [0] * 5
    assert plain.numpy().tolist() == [0] * 3
    assert [s.layout for s in optimizer.variables] == [split.layout, plain.layout]
    assert optimizer.variables[1].slot.array.devices() == {jax.devices()[7]}
