"""Localities and contexts as the documents state them, rule by rule; and the errors of those who break one."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.compat import v1 as tf
from replicax.compat.v1.error_translation import translated
from tests.compat.executors import Executor, always_on_both, entered, two_towers


def devices_of(value: jax.Array) -> set[int]:
    return {d.id for d in value.devices()}


# --- contexts -------------------------------------------------------------------------------------------


def test_by_default_we_are_in_the_default_tower() -> None:
    tower = tf.get_tower_context()
    assert tower is not None
    assert (tower.tower_id, tower.num_towers, tower.is_single_tower) == (0, 1, True)
    assert tower.device == jax.devices()[0]
    assert tower.distribution_strategy is tf.get_distribution_strategy()
    assert tf.get_cross_tower_context() is None
    assert not tf.has_distribution_strategy()
    d = two_towers()
    assert tower.merge_call(lambda d, x, y: (d.num_towers, x + y), 1, y=2) == (1, 3)
    with pytest.raises(RuntimeError, match="in the default tower context, outside every scope"):
        d.reduce("sum", 1.0)


def test_the_default_strategy_gives_ordinary_behaviour() -> None:
    d = tf.DistributionStrategy()
    assert (d.num_towers, d.is_single_tower, d.worker_device_index) == (1, True, 0)
    with d.scope():
        assert tf.get_cross_tower_context() is tf.get_distribution_strategy()
        assert float(d.call_for_each_tower(lambda x: x + 1, 1.0)) == 2
        assert float(d.reduce("sum", 5.0)) == 5  # of one tower the sum is the value
        assert d.unwrap(3) == [3]


@always_on_both
def test_the_scope_is_cross_tower_and_functions_are_in_towers(executor: Executor) -> None:
    d = two_towers()
    seen = []

    def merge_fn(distribution: tf.DistributionStrategy) -> None:
        assert distribution is d is tf.get_cross_tower_context()
        assert tf.get_tower_context() is None

    def fn() -> None:
        tower = tf.get_tower_context()
        assert tower is not None
        assert tf.get_cross_tower_context() is None
        assert tower.distribution_strategy is d is tf.get_distribution_strategy()
        seen.append((tower.num_towers, tower.is_single_tower))
        tower.merge_call(merge_fn)
        assert tf.get_tower_context() is not None

    with entered(d, executor) as entered_as:
        assert entered_as is d
        assert tf.has_distribution_strategy()
        assert tf.get_cross_tower_context() is d
        assert tf.get_tower_context() is None
        d.call_for_each_tower(fn)
    assert set(seen) == {(2, False)}


ACROSS = {
    "reduce": lambda d, v, x: d.reduce("sum", x),
    "batch_reduce": lambda d, v, x: d.batch_reduce("sum", [(x, v)]),
    "broadcast": lambda d, v, x: d.broadcast(x),
    "call_for_each_tower": lambda d, v, x: d.call_for_each_tower(lambda: 0),
    "update": lambda d, v, x: d.update(v, lambda v: v),
    "update_non_slot": lambda d, v, x: d.update_non_slot(d.non_slot_devices([v]), lambda: 0),
    "fetch": lambda d, v, x: d.fetch(v),
    "map": lambda d, v, x: d.map([1], lambda i: i),
    "distribute_dataset": lambda d, v, x: d.distribute_dataset([np.ones(1)]),
    "run_steps_on_dataset": lambda d, v, x: d.run_steps_on_dataset(lambda ctx, x: 0, None),
}


@always_on_both
@pytest.mark.parametrize("method", ACROSS)
def test_what_is_for_across_is_an_error_in_a_tower(executor: Executor, method: str) -> None:
    d, call = two_towers(), ACROSS[method]
    with entered(d, executor):
        v = tf.get_variable("v", initializer=1.0)
        with pytest.raises(RuntimeError, match=rf"distribution\.{method} is for cross-tower context.*merge_call"):
            d.call_for_each_tower(lambda x: call(d, v, x), 1.0)
    with pytest.raises(RuntimeError, match=rf"{method} is for cross-tower context, .* outside every scope"):
        call(d, v, 1.0)
    another = tf.MirroredStrategy(["cpu:2", "cpu:3"])
    mixing = pytest.raises(RuntimeError, match=f"mixing different strategies: {method}")
    with entered(another, executor), mixing:
        call(d, v, 1.0)


def test_unwrap_in_a_tower_says_so_in_tower_words() -> None:
    d = two_towers()
    with d.scope(), pytest.raises(RuntimeError, match=r"distribution.unwrap is for cross-tower context") as caught:
        d.call_for_each_tower(lambda x: d.unwrap(x), 1.0)
    assert "get_tower_context().merge_call(lambda distribution, value: …, value)" in str(caught.value)
    assert "replica" not in str(caught.value)


def test_optimizers_have_a_side_of_their_own() -> None:
    import optax

    d = two_towers()
    with d.scope():
        v = tf.get_variable("v", initializer=1.0)
        optimizer = tf.Optimizer(optax.sgd(1.0))
        with pytest.raises(RuntimeError, match="use optimizer._distributed_apply"):
            optimizer.apply_gradients([(1.0, v)])
        with pytest.raises(RuntimeError, match="compute_gradients is for a tower"):
            optimizer.compute_gradients(lambda: v.value, [v])
        with pytest.raises(RuntimeError, match="_distributed_apply is for cross-tower context"):
            d.call_for_each_tower(lambda: optimizer._distributed_apply(d, [(v.value, v)]))
        with pytest.raises(ValueError, match=r"no gradients provided for any variable: \['v'\]"):
            d.call_for_each_tower(lambda: optimizer.apply_gradients([(None, v)]))


@always_on_both
def test_a_tower_that_is_over(executor: Executor) -> None:
    d = two_towers()
    kept: list[Any] = []
    with entered(d, executor):
        d.call_for_each_tower(lambda: kept.append(tf.get_tower_context()))
        with pytest.raises(RuntimeError, match=r"merge_call was used in cross-tower context"):
            kept[0].merge_call(lambda d: 0)


def test_another_thread_is_outside() -> None:
    d = two_towers()
    found = []
    with d.scope():
        thread = threading.Thread(target=lambda: found.append(tf.has_distribution_strategy()))
        thread.start()
        thread.join()
    assert found == [False]


# --- T, M, V(v), N --------------------------------------------------------------------------------------


@always_on_both
def test_reduce_takes_t_and_gives_m_or_v(executor: Executor) -> None:
    d = tf.DistributionStrategy.of(replicax.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2"))
    with entered(d, executor):
        v = tf.get_variable("v", initializer=1.0)
        t = d.call_for_each_tower(lambda i: jnp.float32(1 + i), d.worker_device_index)
        assert isinstance(t, tf.PerDevice)
        m = d.reduce("sum", t)
        assert isinstance(m, tf.Mirrored)
        assert (float(m), devices_of(m)) == (3, {0, 1})
        at_v = d.reduce(tf.VariableAggregation.MEAN, t, v)
        assert (float(at_v), devices_of(at_v)) == (1.5, {2})
        [first, again] = d.batch_reduce("only_first_tower", [(t, v), (t, "/device:CPU:3")])
        assert (float(first), devices_of(first), devices_of(again)) == (1, {2}, {3})
        assert devices_of(d.reduce("sum", t, t)) == {0, 1}  # an all-reduction


@always_on_both
def test_reducing_what_is_not_per_device(executor: Executor) -> None:
    d = two_towers()
    with entered(d, executor):
        assert d.reduce("sum", 0) == d.reduce("mean", 0.0) == 0
        assert d.reduce("mean", 5.0) == d.reduce("only_first_tower", 5.0) == 5
        with pytest.raises(ValueError, match=r"PerDevice value, but got 5.0, which all 2 towers share"):
            d.reduce("sum", 5.0)
        for wrong in (3, [5.0], [(5.0,)]):
            with pytest.raises(TypeError, match=r"batch_reduce: expected a list of pairs \(value, destinations\), got"):
                d.batch_reduce("sum", wrong)


@always_on_both
def test_broadcast_gives_m_or_v(executor: Executor) -> None:
    d = tf.DistributionStrategy.of(replicax.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2"))
    with entered(d, executor):
        v = tf.get_variable("v", initializer=1.0)
        assert devices_of(d.broadcast(1.0)) == {0, 1}
        assert devices_of(d.broadcast(1.0, v)) == {2}
        assert devices_of(d.broadcast(1.0, ["/device:CPU:3", "/device:CPU:4"])) == {3, 4}
        with pytest.raises(TypeError, match="PerDevice"):
            d.broadcast(d.worker_device_index)


@always_on_both
def test_update_takes_v(executor: Executor) -> None:
    d = two_towers()
    with entered(d, executor):
        v = tf.get_variable("v", initializer=1.0)
        t = d.call_for_each_tower(lambda i: jnp.float32(1 + i), d.worker_device_index)
        with pytest.raises(TypeError, match=r"update: args\[0\] is PerDevice.*one value for each tower: reduce it"):
            d.update(v, lambda v, x: v.assign(x), t)
        with pytest.raises(TypeError, match=r"update_non_slot: kwargs\['x'\] is PerDevice"):
            d.update_non_slot(d.non_slot_devices([v]), lambda x: v.assign(x), x=t)
        assert float(v) == 1.0


@always_on_both
def test_update_in_a_merge_fn_takes_v(executor: Executor) -> None:
    """There whether towers differ in a value is inferred."""
    d = two_towers()
    with entered(d, executor):
        v = tf.get_variable("v", initializer=1.0)

        def assign(distribution: Any, x: Any) -> None:
            distribution.update(v, lambda v, x: v.assign(x), x)

        with pytest.raises(ValueError, match="distribution.update: args\\[0\\] differs between towers: reduce it"):
            d.call_for_each_tower(
                lambda i: tf.get_tower_context().merge_call(assign, jnp.float32(i)), d.worker_device_index
            )
        assert float(v) == 1.0
        d.call_for_each_tower(lambda x: tf.get_tower_context().merge_call(assign, x + 1), 4.0)
        assert float(v) == 5.0


@always_on_both
def test_tower_local_variables_are_t(executor: Executor) -> None:
    """So ``update`` wants their aggregate, which is for cross-tower context."""
    d, another = two_towers(), two_towers()
    with entered(d, executor):
        v = tf.get_variable("v", initializer=1.0)
        with d.tower_local_var_scope("sum"):
            local = tf.get_variable("local", initializer=0.0)
        d.call_for_each_tower(lambda i: local.assign(jnp.float32(1 + i)), d.worker_device_index)
        of_its_own = (
            r"the tower-local variable 'local'.*, of which each tower has a value of its own: pass distribution.read_v"
        )
        with pytest.raises(TypeError, match=rf"distribution\.update: args\[0\] is {of_its_own}"):
            d.update(v, lambda v, x: v.assign(x), local)
        with pytest.raises(TypeError, match=rf"distribution\.update_non_slot: kwargs\['x'\] is {of_its_own}"):
            d.call_for_each_tower(
                lambda: tf.get_tower_context().merge_call(
                    lambda d: d.update_non_slot(d.non_slot_devices([v]), lambda x: v.assign(x), x=local)
                )
            )
        d.update(v, lambda v, x: v.assign(x), d.read_var(local))
        assert float(v) == float(d.reduce("sum", local)) == 3
        with pytest.raises(
            RuntimeError, match=r"distribution\.read_var is for cross-tower context.*in a tower context"
        ):
            d.call_for_each_tower(lambda: d.read_var(local))
        assert float(d.call_for_each_tower(lambda: d.read_var(v))) == 3  # which has one value wherever it is read
    with entered(another, executor):
        for read in (another.read_var, another.fetch):
            with pytest.raises(
                RuntimeError, match=r"'v'.* belongs to .*, but distribution.read_var is called on another"
            ):
                read(v)


@always_on_both
def test_colocating_with_non_slot_devices_gives_n(executor: Executor) -> None:
    d = tf.DistributionStrategy.of(replicax.ShardedStrategy(["cpu:0", "cpu:1"]))
    with entered(d, executor):
        v = tf.get_variable("v", shape=[600], initializer=jnp.zeros)
        with d.colocate_vars_with(d.non_slot_devices([v])):
            n = tf.get_variable("n", shape=[600], initializer=jnp.zeros)
        assert len({s.data.shape for s in v.value.addressable_shards} | {n.shape}) <= 2
        assert n.layout != v.layout
        d.update_non_slot(d.non_slot_devices([v]), lambda x: n.assign_add(x), jnp.ones(600))
        assert float(n.numpy().sum()) == 600
        lists = d.update_non_slot(d.non_slot_devices([v]), lambda: {"n": n.value.sum()}, grouped=False)
        assert [float(x) for x in lists["n"]] == [600] * 2
    with pytest.raises(RuntimeError, match="outside its scope"):
        d.colocate_vars_with(v)


@always_on_both
def test_fetch_takes_any_locality_but_t(executor: Executor) -> None:
    d = two_towers()
    with entered(d, executor):
        v = tf.get_variable("v", initializer=2.0)
        with d.tower_local_var_scope("sum"):
            local = tf.get_variable("local", initializer=0.0)
        d.call_for_each_tower(lambda i: local.assign_add(jnp.float32(1 + i)), d.worker_device_index)
        assert float(d.fetch(local)) == 3  # reduced
        assert float(d.fetch(local, fn=lambda x: x * 2)) == 6
        assert devices_of(d.fetch(v)) == {0}
        assert devices_of(d.fetch(v, "/device:CPU:5")) == {5}
        assert float(d.fetch(d.broadcast(4.0), fn=lambda x: x + 1)) == 5
        with pytest.raises(ValueError, match="PerDevice value has no single value to copy: reduce it first"):
            d.fetch(d.worker_device_index)


@always_on_both
def test_a_mirrored_variable_takes_no_t(executor: Executor) -> None:
    d = two_towers()
    with entered(d, executor):
        v = tf.get_variable("v", initializer=2.0)
        with pytest.raises(ValueError, match=r"differs between towers.*Reduce the value first") as caught:
            d.call_for_each_tower(lambda i: v.assign(jnp.float32(i)), d.worker_device_index)
        assert "get_tower_context().merge_call" in str(caught.value)
        assert float(v) == 2.0


@always_on_both
@pytest.mark.parametrize("aggregation", ["median", tf.VariableAggregation.NONE, None, 3])
def test_ways_to_combine_that_there_are_not(executor: Executor, aggregation: Any) -> None:
    d = two_towers()
    with entered(d, executor):
        message = "expected one of 'sum', 'mean', 'only_first_tower', or a VariableAggregation"
        with pytest.raises(ValueError, match=f"distribution.reduce: {message}"):
            d.reduce(aggregation, d.worker_device_index)
        with (
            pytest.raises(ValueError, match=f"tower_local_var_scope.*: {message}"),
            d.tower_local_var_scope(aggregation),
        ):
            pass


@always_on_both
def test_each_name_of_a_way_to_combine(executor: Executor) -> None:
    d = two_towers()
    with entered(d, executor):
        t = d.worker_device_index
        for how in ("SUM", "sum", tf.VariableAggregation.SUM, replicax.ReduceOp.SUM, replicax.Aggregation.SUM):
            assert float(d.reduce(how, t)) == 1
        for first in (tf.VariableAggregation.ONLY_FIRST_TOWER, replicax.Aggregation.ONLY_FIRST_REPLICA):
            assert float(d.reduce(first, t)) == 0


# --- words ----------------------------------------------------------------------------------------------


def test_errors_of_users_are_left_alone() -> None:
    d = two_towers()

    def fn() -> None:
        raise ValueError("a replica of a vase")

    with d.scope(), pytest.raises(ValueError, match="a replica of a vase"):
        d.call_for_each_tower(fn)


def test_words_that_are_parts_of_others_stay() -> None:
    text = (
        "at /home/replica/replicas.py:3, in my_replica and replica-set.toml: the replicas' number, a replica. Replicas"
    )
    assert translated(text) == (
        "at /home/replica/replicas.py:3, in my_replica and replica-set.toml: the towers' number, a tower. Towers"
    )
    assert translated(translated(text)) == translated(text)


@pytest.mark.parametrize("filtering", ["off", "remove_frames"])
def test_what_jax_raises_is_explained_in_tower_words(filtering: str) -> None:
    """Whether JAX leaves its own frames out of tracebacks, as it does by default, or not."""
    before = jax.config.values["jax_traceback_filtering"]
    jax.config.update("jax_traceback_filtering", filtering)
    d = two_towers()
    try:
        with d.scope(), pytest.raises(jax.errors.TracerBoolConversionError, match="for all towers and calls"):
            d.call_for_each_tower(lambda x: 1 if x > 0 else 2, d.worker_device_index)
        named = pytest.raises(jax.errors.TracerBoolConversionError, match=r"depends on the argument batch\['x'\]")
        with d.scope(), named:
            d.call_for_each_tower(lambda batch: 1 if batch["x"] > 0 else 2, {"x": d.worker_device_index})
    finally:
        jax.config.update("jax_traceback_filtering", before)


@always_on_both
def test_a_collective_on_which_towers_disagree(executor: Executor) -> None:
    d = two_towers()

    def fn(x: Any) -> Any:
        tower = tf.get_tower_context()
        return jax.lax.cond(x > 0, lambda: tower.merge_call(lambda d, x: d.reduce("sum", x), x), lambda: x)

    with entered(d, executor), pytest.raises(replicax.errors.DeadlockError) as caught:
        d.call_for_each_tower(fn, d.worker_device_index)
    assert "replica " not in str(caught.value)
