"""Steps on datasets, and the way back into towers from across."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from replicax.compat import v1 as tf
from tests.compat.executors import Executor, entered, numbers, on_both, two_towers


def full(*values: float) -> list[np.ndarray]:
    return [np.full(2, value, np.float32) for value in values]


# --- run_steps_on_dataset -------------------------------------------------------------------------------


@on_both
@pytest.mark.parametrize("count", [1, 2])
def test_steps_on_a_dataset(executor: Executor, count: int) -> None:
    d = tf.MirroredStrategy([f"cpu:{i}" for i in range(count)])

    def step_fn(ctx: tf.MultiStepContext, x: Any, y: Any) -> None:
        assert tf.get_cross_tower_context() is d
        losses = d.call_for_each_tower(tower_fn, x, scale=y)
        ctx.set_last_step_output("sum", losses, tf.VariableAggregation.SUM)
        ctx.set_last_step_output("mean", losses, aggregation="mean")
        ctx.set_last_step_output("first", losses, tf.VariableAggregation.ONLY_FIRST_TOWER)
        ctx.set_last_step_output("each", losses)
        ctx.set_last_step_output("reduced", d.reduce("mean", losses))
        ctx.set_non_tensor_output("name", "step")

    def tower_fn(x: Any, scale: Any) -> Any:
        total.assign_add(x.sum())
        return (x * scale).sum()

    with entered(d, executor):
        with d.tower_local_var_scope("sum"):
            total = tf.get_variable("total", initializer=0.0)
        inputs = [(x, np.float32(10)) for x in full(*range(12))]  # of each element a part is a scalar
        iterator = d.distribute_dataset(lambda: inputs).make_one_shot_iterator()
        ctx = d.run_steps_on_dataset(step_fn, iterator, iterations=3)
        last = [20.0 * (2 * count + i) for i in range(count)]  # the towers' losses of the third step
        outputs = ctx.last_step_outputs
        assert numbers(d, outputs["each"]) == last
        assert float(outputs["sum"]) == sum(last)
        assert float(outputs["mean"]) == float(outputs["reduced"]) == sum(last) / count
        assert float(outputs["first"]) == last[0]
        assert ctx.non_tensor_outputs == {"name": "step"}
        assert ctx.run_op is None
        assert float(d.read_var(total)) == 2 * sum(range(3 * count))
        d.run_steps_on_dataset(step_fn, iterator)  # one more
        assert float(d.read_var(total)) == 2 * sum(range(4 * count))
        d.run_steps_on_dataset(step_fn, iterator, iterations=100)  # what is left
        assert float(d.read_var(total)) == 2 * sum(range(12))
        with pytest.raises(StopIteration):
            d.run_steps_on_dataset(step_fn, iterator)


@on_both
def test_an_output_of_a_tower_has_to_be_combined(executor: Executor) -> None:
    d = two_towers()

    def step_fn(ctx: tf.MultiStepContext, x: Any) -> None:
        def tower_fn(x: Any) -> None:
            ctx.set_last_step_output("x", x, *how)

        d.call_for_each_tower(tower_fn, x)

    with entered(d, executor):
        how: tuple[Any, ...] = (tf.VariableAggregation.SUM,)
        iterator = d.distribute_dataset(full(1, 2)).make_one_shot_iterator()
        ctx = d.run_steps_on_dataset(step_fn, iterator)
        assert ctx.last_step_outputs["x"].tolist() == [3, 3]
        how = ()
        iterator = d.distribute_dataset(full(1, 2)).make_one_shot_iterator()
        with pytest.raises(ValueError, match=r"in a tower context must say how to combine the towers' values: aggreg"):
            d.run_steps_on_dataset(step_fn, iterator)
        with pytest.raises(ValueError, match="expected one of 'sum', 'mean', 'only_first_tower', 'none'"):
            tf.MultiStepContext().set_last_step_output("x", 1.0, "median")


@on_both
@pytest.mark.parametrize(
    ("initial", "message"),
    [
        ({"x": jnp.zeros(3)}, r"output\['x'\] is float32\[3\] in initial_loop_values, and float32\[2\] in the step"),
        ({"x": jnp.zeros(2, int)}, r"output\['x'\] is int32\[2\] in initial_loop_values"),
        ({}, r"output\['x'\] is missing in initial_loop_values, and float32\[2\] in the step"),
        ({"x": jnp.zeros(2), "y": 0.0}, r"output\['y'\] is float32\[\] in initial_loop_values, and missing in"),
        (jnp.zeros(2), "initial_loop_values must be a dict"),
    ],
    ids=["shape", "dtype", "none", "another", "no dict"],
)
def test_initial_loop_values_must_match(executor: Executor, initial: Any, message: str) -> None:
    d = two_towers()

    def step_fn(ctx: tf.MultiStepContext, x: Any) -> None:
        d.update_non_slot(d.non_slot_devices([steps]), lambda: steps.assign_add(1))
        ctx.set_last_step_output("x", x, "sum")

    with entered(d, executor):
        steps = tf.get_variable("steps", initializer=0)
        iterator = d.distribute_dataset(full(1, 2, 3, 4)).make_one_shot_iterator()
        with pytest.raises(ValueError, match=message):
            d.run_steps_on_dataset(step_fn, iterator, 1, initial)
        assert int(steps) == 0
        ctx = d.run_steps_on_dataset(step_fn, iterator, 2, {"x": jnp.zeros(2)})  # no element was lost
        assert (ctx.last_step_outputs["x"].tolist(), int(steps)) == ([7, 7], 2)
        iterator = d.distribute_dataset(full(1, 2)).make_one_shot_iterator()
        with pytest.raises(ValueError, match=message):  # of a step that is known
            d.run_steps_on_dataset(step_fn, iterator, 1, initial)


@on_both
def test_initial_loop_values_where_towers_differ_in_size(executor: Executor) -> None:
    d = two_towers()

    def step_fn(ctx: tf.MultiStepContext, x: Any) -> None:
        ctx.set_last_step_output("total", d.call_for_each_tower(jnp.sum, x), "sum")

    with entered(d, executor):
        iterator = d.distribute_dataset([np.ones(3, np.float32), np.ones(2, np.float32)]).make_one_shot_iterator()
        with pytest.raises(
            ValueError, match=r"output\['total'\] is float32\[1\] in initial_loop_values, and float32\[\]"
        ):
            d.run_steps_on_dataset(step_fn, iterator, 1, {"total": jnp.zeros(1)})
        ctx = d.run_steps_on_dataset(step_fn, iterator, 1, {"total": 0.0})
        assert float(ctx.last_step_outputs["total"]) == 5


def test_steps_want_an_iterator_of_this_strategy() -> None:
    d = two_towers()
    with d.scope():
        with pytest.raises(TypeError, match="expected an iterator, distribution.distribute_dataset"):
            d.run_steps_on_dataset(lambda ctx, x: None, full(1))
        another = tf.MirroredStrategy(["cpu:2", "cpu:3"])
    with another.scope():
        iterator = another.distribute_dataset(full(1, 2)).make_one_shot_iterator()
    with d.scope(), pytest.raises(ValueError, match="dataset was distributed by another strategy"):
        d.run_steps_on_dataset(lambda ctx, x: None, iterator)


def test_many_steps_are_one_dispatch() -> None:
    d = two_towers()
    traced = []

    def step_fn(ctx: tf.MultiStepContext, x: Any) -> None:
        traced.append(None)
        ctx.set_last_step_output("x", d.call_for_each_tower(jnp.sum, x), "sum")

    with d.scope():
        iterator = d.distribute_dataset(full(*range(40))).make_one_shot_iterator()
        for _ in range(2):
            d.run_steps_on_dataset(step_fn, iterator, iterations=10)
    assert len(traced) == 1


# --- into a tower, from across --------------------------------------------------------------------------


@on_both
def test_towers_again_in_a_merge_fn(executor: Executor) -> None:
    d = two_towers()

    def again(x: Any, shared: Any) -> Any:
        tower = tf.get_tower_context()
        assert tower is not None
        v.assign_add(x + shared)  # this tower's own
        return {"x": x + jnp.float32(tower.tower_id), "shared": tower.merge_call(lambda d, x: d.reduce("sum", x), x)}

    def merge_fn(distribution: Any, x: Any) -> Any:
        total = distribution.reduce("sum", x)
        results = distribution.call_for_each_tower(again, x, shared=total)
        assert tf.get_cross_tower_context() is distribution
        shared = distribution.fetch(results["shared"])  # the same for all, as is inferred
        distribution.update(w, lambda w, s: w.assign(s), results["shared"] if reads_shared else shared)
        return results["x"], distribution.unwrap(results["x"])

    def fn(i: Any) -> Any:
        return tf.get_tower_context().merge_call(merge_fn, jnp.float32(1 + i))

    with entered(d, executor):
        v = tf.get_variable("v", initializer=0.0, synchronization="on_read", aggregation="sum")
        w = tf.get_variable("w", initializer=0.0)
        reads_shared = True
        own, everyones = d.call_for_each_tower(fn, d.worker_device_index)
        assert numbers(d, own) == [1, 3]
        assert [float(x) for x in everyones] == [1, 3]
        assert numbers(d, v) == [4, 5]
        assert float(w) == 3
        w.assign(0.0)
        reads_shared = False
        d.call_for_each_tower(fn, d.worker_device_index)
        assert float(w) == 3
        with pytest.raises(ValueError, match=r"distribution\.fetch: val differs between towers: reduce it first"):
            d.call_for_each_tower(
                lambda i: tf.get_tower_context().merge_call(lambda d, x: d.fetch(x), jnp.float32(i)),
                d.worker_device_index,
            )


@on_both
def test_towers_in_the_merge_fn_of_a_tower_that_was_entered_again(executor: Executor) -> None:
    d = two_towers()

    def down(levels: int, x: Any) -> Any:
        if not levels:
            return x + jnp.float32(tf.get_tower_context().tower_id)
        return tf.get_tower_context().merge_call(
            lambda d, x: d.call_for_each_tower(lambda x: down(levels - 1, x), x), x
        )

    with entered(d, executor):
        assert numbers(d, d.call_for_each_tower(lambda x: down(3, x), 1.0)) == [1, 2]


@on_both
def test_variables_in_a_merge_fn(executor: Executor) -> None:
    """What is there for cross-tower context is there inside a step, too."""
    d = two_towers()

    def merge_fn(distribution: Any, x: Any) -> Any:
        assert distribution.group(x) is None
        result = distribution.update(v, lambda v, s: v.assign_add(s).value, distribution.reduce("mean", x))
        lists = distribution.update_non_slot(distribution.non_slot_devices([v]), lambda: v.value, grouped=False)
        index = distribution.call_for_each_tower(lambda i: i + 0, distribution.worker_device_index)
        return {
            "v": distribution.fetch(v, fn=lambda v: v * 2.0),
            "local": distribution.fetch(local),
            "first": distribution.read_var(first),
            "result": result,
            "lists": len(lists),
            "broadcast": distribution.broadcast(result, v),
            "sizes": [len(distribution.unwrap(value)) for value in (x, local, result, index)],
        }

    def fn(i: Any) -> Any:
        local.assign(jnp.float32(1 + i))
        first.assign(jnp.float32(1 + i))
        return tf.get_tower_context().merge_call(merge_fn, jnp.float32(2 * i))

    with entered(d, executor):
        v = tf.get_variable("v", initializer=1.0)
        with d.tower_local_var_scope("sum"):
            local = tf.get_variable("local", initializer=0.0)
        with d.tower_local_var_scope(tf.VariableAggregation.ONLY_FIRST_TOWER):
            first = tf.get_variable("first", initializer=0.0)
        found = d.call_for_each_tower(fn, d.worker_device_index)
        assert (found["lists"], found["sizes"]) == (2, [2, 2, 2, 2])
        numbers_found = {name: float(found[name]) for name in ("v", "local", "first", "result", "broadcast")}
        assert numbers_found == {"v": 4, "local": 3, "first": 1, "result": 2, "broadcast": 2}


def test_in_the_default_tower_a_merge_fn_may_call_towers() -> None:
    def merge_fn(d: tf.DistributionStrategy, x: Any) -> Any:
        return d.call_for_each_tower(lambda x: x + 1, x)

    assert float(tf.get_tower_context().merge_call(merge_fn, 1.0)) == 2
