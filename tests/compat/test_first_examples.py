"""The code examples of the first generation's documents, with nothing changed but ``tf``'s operations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.compat import v1 as tf
from tests.compat.documents import documents
from tests.compat.executors import Executor, entered, numbers, on_both, two_towers


def test_each_example_is_here() -> None:
    """Counted in the documents; the plain text, which marks no code, has those of the other one of its class."""
    examples = {name[:3]: document.examples for name, document in documents().items()}
    assert examples["002"] == 7  # a test each, in the document's order
    assert examples["000"] == 5  # the last five of them once more
    assert examples["001"] == 0


@on_both
def test_ordinary_model_code_under_a_strategy(executor: Executor) -> None:
    my_distribution = two_towers()
    dataset = [np.full((4, 1), float(i), np.float32) for i in range(4)]

    def tower_fn(x: Any) -> Any:
        w = tf.get_variable("w", initializer=1.0)
        optimizer.minimize(lambda: jnp.mean((x * w.value) ** 2))
        return w

    with entered(my_distribution, executor):
        import optax

        optimizer = tf.Optimizer(optax.sgd(0.25))
        iterator = my_distribution.distribute_dataset(dataset).make_one_shot_iterator()
        tower_train_ops = my_distribution.call_for_each_tower(tower_fn, iterator.get_next())
        train_op = my_distribution.group(tower_train_ops)
        assert train_op is None  # what tf.group gives when everything runs at once
        [w] = tf.trainable_variables()
        # The mean over both towers' examples, of x = 0 and of x = 1: its gradient at 1 is (0 + 2) / 2.
        assert float(w) == 1 - 0.25 * (0 + 2) / 2
        my_distribution.call_for_each_tower(tower_fn, iterator.get_next())
        assert float(w) == 0.75 - 0.25 * (8 * 0.75 + 18 * 0.75) / 2


@on_both
def test_an_iterator_that_is_to_be_initialized(executor: Executor) -> None:
    my_distribution = two_towers()
    with entered(my_distribution, executor):
        iterator = my_distribution.distribute_dataset([np.ones(1), np.zeros(1)]).make_initializable_iterator()
        with pytest.raises(RuntimeError, match="has not been initialized: run iterator.initializer"):
            iterator.get_next()
        for begin in (iterator.initializer.run, iterator.initializer):  # each time anew
            begin()  # session.run(iterator.initializer)
            assert numbers(my_distribution, iterator.get_next()) == [1.0, 0.0]
            with pytest.raises(StopIteration):
                iterator.get_next()


@on_both
def test_the_index_of_worker_devices(executor: Executor) -> None:
    distribution_strategy = two_towers()
    with entered(distribution_strategy, executor):

        def fn(device_id: Any) -> Any:
            return device_id * 10 + tf.get_tower_context().tower_id

        results = distribution_strategy.call_for_each_tower(fn, distribution_strategy.worker_device_index)
        assert numbers(distribution_strategy, results) == [0, 11]
    with entered(tf.OneDeviceStrategy("/device:CPU:0"), executor) as one:
        assert one.worker_device_index == 0
        assert one.call_for_each_tower(fn, one.worker_device_index) == 0


@on_both
@pytest.mark.parametrize("count", [1, 2, 4])
def test_merge_call(executor: Executor, count: int) -> None:
    distribution = tf.MirroredStrategy([f"/device:CPU:{i}" for i in range(count)])

    # Called once in "cross-tower" context.
    def merge_fn(distribution: tf.DistributionStrategy, three_plus_tower_id: Any) -> Any:
        # sum the values across towers
        return sum(distribution.unwrap(three_plus_tower_id))

    # Called once per tower in `distribution`, in a "tower" context.
    def fn(three: Any) -> Any:
        tower_ctx = tf.get_tower_context()
        v = three + tower_ctx.tower_id
        # Computes the sum of the `v` values across all towers.
        s = tower_ctx.merge_call(merge_fn, v)
        return s + v

    with entered(distribution, executor):
        # in "cross-tower" context
        merged_results = distribution.call_for_each_tower(fn, 3)
        # merged_results has the values from every tower execution of `fn`.
        total = sum(3 + i for i in range(count))
        assert numbers(distribution, merged_results) == [total + 3 + i for i in range(count)]


@on_both
def test_colocated_variables(executor: Executor) -> None:
    distribution_strategy = tf.DistributionStrategy.of(replicax.ShardedStrategy(["cpu:0", "cpu:1"]))
    with entered(distribution_strategy, executor):
        var1 = tf.get_variable("var1", shape=[600, 2], initializer=jnp.zeros)
        with distribution_strategy.colocate_vars_with(var1):
            # var2 and var3 will be created on the same device(s) as var1
            var2 = tf.get_variable("var2", shape=[600, 2], initializer=jnp.ones)
            var3 = tf.get_variable("var3", shape=[600], initializer=jnp.ones)

        def fn(v1: Any, v2: Any, v3: Any) -> Any:
            # operates on v1 from var1, v2 from var2, and v3 from var3
            return v1.assign(v2 + v3[:, None])

        # `fn` runs on every device `v1` is on, `v2` and `v3` will be there too.
        distribution_strategy.update(var1, fn, var2, var3)
        assert var1.layout == var2.layout  # V(var2) is V(var1)
        assert var3.sharding.device_set == var1.sharding.device_set
        np.testing.assert_array_equal(var1.numpy(), np.full((600, 2), 2.0))


@on_both
def test_a_dataset_for_each_tower(executor: Executor) -> None:
    distribution_strategy = two_towers()

    def dataset_fn() -> Any:  # tf.data.Dataset.from_tensors([[1.]]).repeat()
        while True:
            yield np.array([[1.0]], np.float32)

    def tower_fn(x: Any) -> Any:
        assert x.shape == (1, 1)  # a whole element, which is not divided
        return x[0, 0] + jnp.float32(tf.get_tower_context().tower_id)

    with entered(distribution_strategy, executor):
        distributed_dataset = distribution_strategy.distribute_dataset(dataset_fn)
        iterator = distributed_dataset.make_one_shot_iterator()
        tower_results = distribution_strategy.call_for_each_tower(tower_fn, iterator.get_next())
        assert numbers(distribution_strategy, tower_results) == [1.0, 2.0]


@on_both
def test_update_is_like_a_loop_over_devices(executor: Executor) -> None:
    distribution = two_towers()
    with entered(distribution, executor):
        var = tf.get_variable("var", initializer=[1.0, 2.0])
        mirrored = distribution.broadcast(jnp.asarray([10.0, 20.0]))

        def fn(v: Any, x: Any, scale: float) -> Any:
            assert not isinstance(x, tf.PerDevice)  # unwrapped if it is mirrored
            return v.assign_add(x * scale).value

        assert distribution.update(var, fn, mirrored, scale=0.5).tolist() == [6.0, 12.0]
        results = distribution.update(var, fn, mirrored, scale=0.5, grouped=False)
        assert [r.tolist() for r in results] == [[11.0, 22.0]] * 2


# --- what the text says of values -----------------------------------------------------------------------


@on_both
def test_unwrapping_and_merging(executor: Executor) -> None:
    """``fn()`` returns ``(x, a, v0)`` on tower 0, ``(x, b, v1)`` on tower 1."""
    d = two_towers()
    with entered(d, executor):
        v = tf.get_variable("v", initializer=1.0)
        x, w = object(), d.worker_device_index
        same, different, variable = d.call_for_each_tower(lambda w: (x, w * 2, v), w)
        assert same is x
        assert numbers(d, different) == [0, 2]
        assert isinstance(different, tf.PerDevice)
        assert variable is v
        assert isinstance(v, tf.Mirrored)
        assert len(d.unwrap(v)) == 2
        [first, second] = d.unwrap(different)
        assert d.value_container(second) is different
        assert any(first is each for each in d.unwrap(d.value_container(first)))


@on_both
def test_devices_of_components(executor: Executor) -> None:
    d = two_towers()
    with entered(d, executor):
        values = d.unwrap(d.call_for_each_tower(lambda i: i + 1, d.worker_device_index))
        assert [next(iter(v.devices())) for v in values] == d.worker_devices == jax.devices()[:2]
