"""The strategies that the documents name, and any other one in tower words."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.compat import v1 as tf
from replicax.compat.v1.error_translation import translated
from tests.compat.executors import Executor, entered, on_both, two_towers


def on_tpu(num_cores: int | None = None) -> tf.TPUStrategy:
    return tf.TPUStrategy(replicax.TPUClusterResolver(emulate="2x2x1x2"), 100, num_cores)


def test_a_tpu_strategy() -> None:
    d = on_tpu()
    assert isinstance(d, tf.OneDeviceStrategy)
    assert (d.num_towers, d.is_single_tower, d.steps_per_run) == (8, False, 100)
    assert (d.num_hosts, d.num_towers_per_host) == (1, 8)
    assert d.get_host_cpu_device(0) == jax.devices("cpu")[0]
    with pytest.raises(ValueError, match="there is no host 1"):
        d.get_host_cpu_device(1)
    assert isinstance(d.strategy, replicax.TPUStrategy)
    twin = copy.deepcopy(d)
    assert (twin.steps_per_run, twin.num_hosts, twin.strategy is d.strategy) == (100, 1, False)


@pytest.mark.parametrize("cores", [1, 4, 8])
def test_some_of_the_cores(cores: int) -> None:
    d = on_tpu(cores)
    assert (d.num_towers, d.is_single_tower, len(d.worker_devices)) == (cores, cores == 1, cores)
    with d.scope():
        total = d.reduce("sum", d.call_for_each_tower(lambda i: i + 1, d.worker_device_index))
    assert int(total) == cores * (cores + 1) // 2
    with pytest.raises(ValueError, match="9"):
        on_tpu(9)


@pytest.mark.parametrize("make", [two_towers, on_tpu, lambda: tf.OneDeviceStrategy("cpu:1"), tf.DistributionStrategy])
def test_what_runs_before_and_after_everything(make: Any) -> None:
    """Nothing to return, as when the original runs eagerly."""
    d = make()
    assert d.configure() is d.configure(session_config=object()) is d.initialize() is d.finalize() is None
    with pytest.raises(ValueError, match=r"jax\.distributed\.initialize"):
        d.configure(cluster_spec={"worker": ["a:1", "b:2"]}, task_type="worker", task_id=0)
    assert (d.between_graph, d.should_init, d.should_checkpoint, d.should_save_summary) == (False, True, True, True)
    assert d.parameter_devices == d.worker_devices
    assert isinstance(d.worker_devices, list)


def test_devices() -> None:
    assert [x.id for x in tf.MirroredStrategy(["/device:CPU:3", "cpu:1"]).worker_devices] == [3, 1]
    assert tf.MirroredStrategy().num_towers == 8
    assert tf.OneDeviceStrategy("/job:localhost/replica:0/task:0/device:CPU:2").worker_devices == [jax.devices()[2]]
    with pytest.raises(ValueError, match="each tower needs a device of its own"):
        tf.MirroredStrategy(["cpu:0", "cpu:0"])
    with pytest.raises(ValueError, match="pass devices or num_gpus"):
        tf.MirroredStrategy(["cpu:0"], num_gpus=1)
    with pytest.raises(ValueError, match="there is no device 'gpu:0'.* JAX finds no gpu: run `replicax doctor`"):
        tf.MirroredStrategy(num_gpus=2)


def test_any_strategy_in_tower_words() -> None:
    strategy = replicax.ShardedStrategy(["cpu:0", "cpu:1"])
    d = tf.DistributionStrategy.of(strategy)
    assert d is tf.DistributionStrategy.of(strategy)
    assert d.strategy is strategy
    assert repr(d) == "v1.DistributionStrategy(ShardedStrategy([cpu:0, cpu:1]))"
    with strategy.scope():  # the two generations go together
        assert tf.get_cross_tower_context() is d
        v = tf.get_variable("v", initializer=jnp.zeros, shape=[300])
        assert (
            strategy.run(lambda: tf.get_tower_context().merge_call(lambda d: d.update(v, lambda v: v.assign(v + 1))))
            is v
        )
    assert v.numpy().sum() == 300
    with pytest.raises(TypeError, match="expected a replicax.Strategy, got 3"):
        tf.DistributionStrategy.of(3)


def test_each_kind_has_its_own_words() -> None:
    resolver = replicax.TPUClusterResolver(emulate="2x2x1x2")
    d = tf.DistributionStrategy.of(replicax.TPUStrategy(resolver))
    assert type(d) is tf.TPUStrategy
    assert (d.num_towers_per_host, d.steps_per_run) == (8, 1)
    assert type(tf.DistributionStrategy.of(replicax.OneDeviceStrategy("cpu:1"))) is tf.OneDeviceStrategy
    assert type(tf.DistributionStrategy.of(replicax.MirroredStrategy(["cpu:0"]))) is tf.MirroredStrategy


def test_a_resolver_that_is_none() -> None:
    with pytest.raises(TypeError, match="TPUStrategy: expected a TPUClusterResolver, got 'x'"):
        tf.TPUStrategy("x", 2, 1)
    if jax.default_backend() != "tpu":
        with pytest.raises(RuntimeError, match="there is no TPU"):
            tf.TPUStrategy(None, 2, 1)


def test_errors_name_what_was_called() -> None:
    d = two_towers()
    with d.scope():
        with pytest.raises(ValueError, match=r"distribution\.reduce\('sum', …\)"):
            d.reduce("sum", 3.0)
        iterator = d.distribute_dataset([np.ones(1)]).make_one_shot_iterator()
        with pytest.raises(ValueError, match=r"iterations\): iterations must be an int of at least 1, got 'a'"):
            d.run_steps_on_dataset(lambda ctx, x: None, iterator, "a")
    assert translated("a replicax.ReplicaContext") == "a TowerContext"


def test_a_scope_that_is_not_left() -> None:
    d = two_towers()
    scope = d.scope()
    assert scope.__enter__() is d
    assert tf.get_cross_tower_context() is d
    scope.__exit__(None, None, None)
    with two_towers().scope(), pytest.raises(RuntimeError, match="mixing different Strategy objects"), d.scope():
        pass


@on_both
def test_what_kinds_of_values_there_are(executor: Executor) -> None:
    d = two_towers()
    with entered(d, executor):
        per_device, mirrored = d.worker_device_index, d.broadcast(np.ones(2))
        assert [isinstance(v, tf.PerDevice) for v in (per_device, mirrored, 3)] == [True, False, False]
        assert [isinstance(v, tf.Mirrored) for v in (per_device, mirrored, 3)] == [False, True, False]
        for kind in (tf.PerDevice, tf.Mirrored):
            with pytest.raises(
                TypeError, match=f"^{kind.__name__} values are made by a strategy, not by calling {kind.__name__}$"
            ):
                kind({})
