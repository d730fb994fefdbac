"""Variables by name, tower-local ones, and the step's number."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.compat import v1 as tf
from tests.compat.executors import Executor, entered, numbers, on_both, two_towers

# --- names ----------------------------------------------------------------------------------------------


def test_names_and_reuse() -> None:
    with two_towers().scope():
        with tf.variable_scope("a") as scope:
            assert tf.get_variable_scope() is scope
            w = tf.get_variable("w", shape=[2])
            with tf.variable_scope("b"):
                assert tf.get_variable("w", shape=[3]).name == "a/b/w"
            with pytest.raises(ValueError, match=r"there is a variable 'a/w' already.*reuse=True"):
                tf.get_variable("w", shape=[2])
            scope.reuse_variables()
            assert tf.get_variable("w") is w
            with tf.variable_scope("b"):  # reuse goes down
                assert tf.get_variable("w").shape == (3,)
        with tf.variable_scope(scope, reuse=True):
            assert tf.get_variable("w", shape=[2], dtype=jnp.float32) is w
            for other in ({"shape": [3]}, {"dtype": jnp.int32}):
                with pytest.raises(ValueError, match=f"variable 'a/w' has {next(iter(other))}"):
                    tf.get_variable("w", **other)
            with pytest.raises(ValueError, match=r"no variable 'a/v' to reuse; known are \['a/b/w', 'a/w'\]"):
                tf.get_variable("v")
        with tf.variable_scope("a", reuse=tf.AUTO_REUSE):
            assert tf.get_variable("w") is w
            assert tf.get_variable("v", shape=[1]).name == "a/v"
        assert tf.get_variable_scope().name == ""
        assert [v.name for v in tf.trainable_variables()] == ["a/w", "a/b/w", "a/v"]


def test_arguments_that_there_are_not() -> None:
    with two_towers().scope(), pytest.raises(TypeError, match="regularizer.*add what it makes of the variable to the"):
        tf.get_variable("v", shape=[2], regularizer=jnp.sum)


def test_each_strategy_has_names_of_its_own() -> None:
    d = two_towers()
    with d.scope():
        v = tf.get_variable("v", initializer=1.0)
    another = two_towers()
    with another.scope():
        assert tf.get_variable("v", initializer=2.0) is not v
    twin = copy.deepcopy(d)
    assert twin.strategy is not d.strategy
    assert tf.DistributionStrategy.of(twin.strategy) is twin
    with twin.scope():
        assert tf.trainable_variables() == []


def test_initial_values() -> None:
    with two_towers().scope():

        def value(name: str, **kwargs: Any) -> Any:
            return tf.get_variable(name, **kwargs).numpy()

        np.testing.assert_array_equal(value("a", initializer=3.0), 3.0)
        np.testing.assert_array_equal(value("b", shape=[2], initializer=3.0), [3.0, 3.0])
        np.testing.assert_array_equal(value("c", shape=2, initializer=jnp.ones), [1.0, 1.0])
        np.testing.assert_array_equal(value("d", initializer=lambda: jnp.arange(3)), [0, 1, 2])
        np.testing.assert_array_equal(value("e", shape=[2], dtype=jnp.int32), [0, 0])
        found = value("f", shape=[40, 20])
        assert 0.2 < np.abs(found).max() <= (6 / 60) ** 0.5  # Glorot's
        assert not np.array_equal(found, value("g", shape=[40, 20]))
        assert value("h", shape=[5]).std() > 0
        np.testing.assert_array_equal(value("j", shape=[2], initializer=jax.nn.initializers.ones), [1.0, 1.0])
        assert value("k", shape=[40, 20], initializer=jax.nn.initializers.he_normal()).std() > 0
        for wrong in ({}, {"dtype": jnp.float32}):
            with pytest.raises(ValueError, match="a new variable 'i' needs a shape"):
                tf.get_variable("i", **wrong)


@on_both
def test_variables_that_towers_make(executor: Executor) -> None:
    d = two_towers()

    def model(x: Any) -> Any:
        with tf.variable_scope("model", reuse=tf.AUTO_REUSE):
            w = tf.get_variable("w", shape=[2], initializer=jnp.ones)
            b = tf.get_variable("b", shape=[], initializer=jnp.zeros)
        return (x * w.value).sum() + b.value

    def train(x: Any) -> Any:
        own = tf.get_variable("own", shape=[], initializer=jnp.zeros, aggregation="sum")
        own.assign_add(jnp.ones(()))
        return model(x)

    with entered(d, executor):
        for size in (1, 2):  # the second size is traced anew
            for _ in range(2):
                assert float(d.call_for_each_tower(train, jnp.ones(2) * size)) == 2 * size
                assert float(d.call_for_each_tower(lambda x: model(x[..., :2]), jnp.ones(2 + size))) == 2
        assert sorted(v.name for v in tf.trainable_variables()) == ["model/b", "model/w", "own"]
        with tf.variable_scope(tf.VariableScope(), reuse=True):
            assert float(tf.get_variable("own")) == 8
        with pytest.raises(ValueError, match="there is a variable 'own' already"):
            d.call_for_each_tower(lambda: tf.get_variable("own", initializer=1.0).value)


def test_arguments_of_names_and_scopes_are_checked() -> None:
    with two_towers().scope():
        with pytest.raises(TypeError, match="variable_scope: expected a name or a VariableScope, got 3"):
            tf.variable_scope(3).__enter__()
        with pytest.raises(ValueError, match="reuse must be True, False, AUTO_REUSE or None, got 'always'"):
            tf.variable_scope("a", reuse="always").__enter__()
        with pytest.raises(TypeError, match=r"get_variable\(name\): expected a name, got ''"):
            tf.get_variable("")


def test_a_partial_function_finds_its_variables_again() -> None:
    d = two_towers()
    with d.scope():
        for x in (2.0, 3.0):
            assert float(d.call_for_each_tower(functools.partial(_asks, x))) == x


def _asks(x: Any = 1.0) -> Any:
    w = tf.get_variable("w", initializer=1.0)
    replicax.Variable(0.0, name="another").assign_add(1.0)
    return w.value * x


def _plainly(d: tf.DistributionStrategy) -> None:
    assert float(d.call_for_each_tower(_asks)) == 1


def _in_steps(d: tf.DistributionStrategy) -> None:
    iterator = d.distribute_dataset(lambda: [np.ones((), np.float32)] * 4).make_one_shot_iterator()
    d.run_steps_on_dataset(lambda ctx, x: d.call_for_each_tower(_asks, x), iterator, 2)


def _from_across(d: tf.DistributionStrategy) -> None:
    def fn() -> Any:
        return tf.get_tower_context().merge_call(lambda d: d.call_for_each_tower(_asks))

    d.call_for_each_tower(fn)


@on_both
@pytest.mark.parametrize(
    "routes",
    list(itertools.permutations([_plainly, _in_steps, _from_across], 2)),
    ids=lambda r: "".join(f.__name__ for f in r),
)
def test_code_finds_its_variable_by_every_route(executor: Executor, routes: Any) -> None:
    with entered(two_towers(), executor) as d:
        for route in (*routes, *routes):
            route(d)
        assert [v.name for v in tf.trainable_variables()] == ["w"]


@on_both
def test_a_first_run_that_fails(executor: Executor) -> None:
    fails = [True]

    def fn() -> Any:
        w = tf.get_variable("w", initializer=1.0)
        if fails:
            raise KeyError(fails.pop())
        return w.assign_add(1.0)

    with entered(two_towers(), executor) as d:
        with pytest.raises(KeyError):
            d.call_for_each_tower(fn)
        for _ in range(2):
            d.call_for_each_tower(fn)
        with tf.variable_scope("", reuse=True):
            assert float(tf.get_variable("w")) == 3


@on_both
def test_a_name_is_new_once_in_a_call(executor: Executor) -> None:
    def twice() -> None:
        tf.get_variable("w", initializer=1.0)
        tf.get_variable("w", initializer=1.0)

    with entered(two_towers(), executor) as d:
        for _ in range(2):
            with pytest.raises(ValueError, match="there is a variable 'w' already"):
                d.call_for_each_tower(twice)


def test_lambdas_that_reuse_make_nothing() -> None:
    made = []

    def initializer() -> Any:
        made.append(1)
        return jnp.ones(())

    with two_towers().scope() as d:
        for _ in range(3):
            with tf.variable_scope("", reuse=tf.AUTO_REUSE):
                d.call_for_each_tower(lambda: tf.get_variable("w", initializer=initializer).value)
    assert len(made) == 1


@on_both
def test_scopes_around_towers_hold_in_them(executor: Executor) -> None:
    d = two_towers()

    def fn() -> Any:
        with tf.variable_scope("inner"):
            return tf.get_variable("v", initializer=0.0)

    with entered(d, executor):
        with tf.variable_scope("outer"), d.tower_local_var_scope("mean"):
            v = d.call_for_each_tower(fn)
        assert v.name == "outer/inner/v"
        assert v.is_on_read
        assert d.call_for_each_tower(fn).name == "inner/v"
        assert not d.call_for_each_tower(fn).is_on_read
        assert tf.get_variable_scope().name == ""


# --- tower-local variables ------------------------------------------------------------------------------


@on_both
@pytest.mark.parametrize(
    ("how", "expected"), [("sum", 7.0), ("mean", 3.5), (tf.VariableAggregation.ONLY_FIRST_TOWER, 3.0)], ids=str
)
def test_tower_local_variables(executor: Executor, how: Any, expected: float) -> None:
    d = two_towers()
    with entered(d, executor):
        with d.tower_local_var_scope(how):
            # "tower-local implies not trainable", whatever is said.
            v = tf.get_variable("v", initializer=2.0, trainable=True)
        assert not v.trainable
        assert numbers(d, v) == [2, 2]  # one component a tower, the same at first
        d.call_for_each_tower(lambda i: v.assign_add(jnp.float32(1 + i)), d.worker_device_index)
        assert numbers(d, v) == [3, 4]
        assert float(d.fetch(v)) == float(d.read_var(v)) == expected
        assert not isinstance(v, tf.Mirrored)
        assert tf.get_variable("w", initializer=2.0).trainable


@on_both
def test_a_tower_has_the_scope_too(executor: Executor) -> None:
    d = two_towers()

    def fn(i: Any) -> Any:
        with tf.get_tower_context().tower_local_var_scope("sum"):
            v = tf.get_variable("v", initializer=0.0)
        v.assign_add(jnp.float32(i + 1))
        return v

    with entered(d, executor):
        for _ in range(2):
            v = d.call_for_each_tower(fn, d.worker_device_index)
        assert numbers(d, v) == [2, 4]


def test_all_components_begin_alike() -> None:
    d = two_towers()
    with d.scope(), d.tower_local_var_scope("sum"):
        v = tf.get_variable("v", initializer=lambda: jax.random.normal(jax.random.key(0)))
    first, second = d.unwrap(v)
    assert float(first) == float(second)


def test_in_the_default_tower() -> None:
    with tf.get_tower_context().tower_local_var_scope("sum"):
        v = tf.get_variable("test_in_the_default_tower", initializer=1.0)
    v.assign_add(2.0)
    with tf.DistributionStrategy().scope() as d:
        assert float(d.read_var(v)) == 3
        with pytest.raises(TypeError, match=r"distribution\.read_var\(v\): expected a Variable, got 3"):
            d.read_var(3)


# --- the step's number ----------------------------------------------------------------------------------


def test_the_global_step() -> None:
    with two_towers().scope():
        assert tf.get_global_step() is None
        with tf.variable_scope("elsewhere"):
            step = tf.get_or_create_global_step()
        assert step.name == "global_step"
        assert tf.get_global_step() is step is tf.get_or_create_global_step()
        assert not step.trainable
        assert step.dtype == jnp.int32
        with pytest.raises(ValueError, match="there is a variable 'global_step' already"):
            tf.create_global_step()


# --- where they are -------------------------------------------------------------------------------------


@on_both
def test_devices(executor: Executor) -> None:
    central = tf.DistributionStrategy.of(replicax.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2"))
    with entered(central, executor):
        v = tf.get_variable("v", initializer=1.0)
        assert [d.id for d in central.worker_devices] == [0, 1]
        assert [d.id for d in central.parameter_devices] == [2]
        assert list(central.non_slot_devices([v])) == central.parameter_devices
        found = []

        def fn(x: Any) -> Any:
            found.append(tf.get_tower_context().device)
            return x

        if executor is replicax.debug:
            central.call_for_each_tower(fn, 1.0)
            assert [d.id for d in found] == [0, 1]
        else:
            with pytest.raises(RuntimeError, match="a compiled step is one program for the devices of all towers"):
                central.call_for_each_tower(fn, 1.0)
