"""What a step may say that its caller shall see, and what it may not."""

from __future__ import annotations

import contextlib
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.per_replica import executor
from replicax.variables.slots import store_all
from tests.conftest import strategy_of
from tests.sources import numbered


def nothing(ctx, *inputs):
    return None


def test_what_is_no_iterator_of_the_strategy(pair) -> None:
    dataset = pair.distribute_dataset(numbered(3))
    with pytest.raises(TypeError, match="the dataset itself: pass iter"):
        pair.run_steps(nothing, dataset, 1)
    with pytest.raises(TypeError, match="must be one of a dataset of this strategy"):
        pair.run_steps(nothing, iter([1, 2]), 1)
    with pytest.raises(ValueError, match="distributed by another strategy"):
        strategy_of(2).run_steps(nothing, iter(dataset), 1)
    iterator = iter(dataset)
    iterator.close()
    with pytest.raises(ValueError, match="has been closed"):
        pair.run_steps(nothing, iterator, 1)


@pytest.mark.parametrize("steps", [0, -1, 2.5, "3", None, True])
def test_numbers_of_steps_that_are_none(pair, steps) -> None:
    iterator = iter(pair.distribute_dataset(numbered(3)))
    with pytest.raises(ValueError, match="steps must be an int of at least 1, got"):
        pair.run_steps(nothing, iterator, steps)
    assert pair.run_steps(nothing, iterator, np.int64(3)).steps == 3


def test_it_is_not_for_the_inside_of_a_step(pair) -> None:
    iterator = iter(pair.distribute_dataset(numbered(3)))
    with pytest.raises(replicax.errors.ContextError, match="strategy.run_steps"):
        pair.run(lambda: pair.run_steps(nothing, iterator, 1))
    with pytest.raises(replicax.errors.ContextError, match="outside jax.jit"):
        jax.jit(lambda x: pair.run_steps(nothing, iterator, 1))(1.0)
    with pytest.raises(TypeError, match="fn must be callable"):
        pair.run_steps(3, iterator, 1)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda ctx, x: ctx.set_last_step_output("x", x.sum()), ValueError, "must say how to combine"),
        (lambda ctx, x: ctx.set_last_step_output("x", x.sum(), "none"), ValueError, "must say how to combine"),
        (lambda ctx, x: ctx.set_last_step_output("x", x.sum(), "max"), ValueError, "got 'max'"),
        (lambda ctx, x: ctx.set_last_step_output("x", {"a": "text"}, "mean"), TypeError, r"'x'\['a'\] is str 'text'"),
        (lambda ctx, x: ctx.set_last_step_output(3, x.sum(), "mean"), TypeError, "name must be a string, got 3"),
        (lambda ctx, x: ctx.set_non_tensor_output("x", [1, x]), TypeError, r"'x'\[1\] is .* set_last_step_output"),
    ],
)
def test_outputs_that_are_none(pair, use, error, message, debug) -> None:
    iterator = iter(pair.distribute_dataset(numbered(3)))
    executor = replicax.debug() if debug else contextlib.nullcontext()
    with executor, pytest.raises(error, match=message):
        pair.run_steps(use, iterator, 2)
    assert pair.run_steps(nothing, iterator, 5).steps == 3


def test_an_output_from_inside_a_transformation(pair) -> None:
    with pair.scope():
        w = replicax.Variable(1.0)

    def step(ctx, x):
        def loss():
            value = w * x.astype(jnp.float32).sum()
            ctx.set_last_step_output("inside", value, "sum")
            return value

        replicax.value_and_grad(loss, [w])()

    for inside, cure in ((step, "set it afterwards$"), (replicax.loop.accumulated(step, 2), r"accumulated\(step, 4\)")):
        with pytest.raises(replicax.errors.TraceError, match=cure):
            pair.run_steps(inside, iter(pair.distribute_dataset(numbered(2))), 2)


def test_a_context_of_a_step_that_is_over(pair) -> None:
    contexts = []
    ctx = pair.run_steps(lambda ctx, x: contexts.append(ctx), iter(pair.distribute_dataset(numbered(2))), 2)
    for over in (ctx, contexts[0]):
        with pytest.raises(replicax.errors.ContextError, match="a step that is over"):
            over.set_non_tensor_output("late", 1)


def test_outputs_whose_shape_changes(pair) -> None:
    with pair.scope():
        count = replicax.Variable(0)

    def step(ctx, x):
        count.assign_add(1)
        ctx.set_last_step_output("all", x, "sum")

    iterator = iter(pair.distribute_dataset([np.zeros(4, np.float32)] * 2 + [np.zeros(2, np.float32)]))
    with pytest.raises(
        ValueError, match=r"output\['all'\] is float32\[2\] in step 0 of these, and float32\[1\] in step 2"
    ):
        pair.run_steps(step, iterator, 3)
    assert int(count) == 0
    assert pair.run_steps(step, iterator, 2).steps == 2


def test_initial_loop_values_must_match(pair) -> None:
    def step(ctx, x):
        ctx.set_last_step_output("loss", x.astype(jnp.float32).sum(), "sum")

    def run(initial: Any) -> Any:
        iterator = iter(pair.distribute_dataset(numbered(2)))
        return pair.run_steps(step, iterator, 2, initial_loop_values=initial).last_step_outputs

    for zero in (jnp.float32(0), np.zeros(()), 0.0):  # NumPy's float64 is float32 in a step
        assert float(run({"loss": zero})["loss"]) == 5.0
    with pytest.raises(
        ValueError, match=r"output\['loss'\] is float32\[2\] in initial_loop_values, and float32\[\] in"
    ):
        run({"loss": np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match=r"output\['other'\] is float32.*, and missing in.* Leave"):
        run({"loss": jnp.float32(0), "other": jnp.float32(0)})
    with pytest.raises(ValueError, match="a dict with a value for each output, got 0.0"):
        run(0.0)


def test_outputs_across_replicas(pair) -> None:
    def step(ctx, x):
        mine = x.astype(jnp.float32).sum()

        def across(strategy, value):
            ctx.set_last_step_output("sum", value, "sum")
            ctx.set_last_step_output("mean", {"nested": value}, replicax.ReduceOp.MEAN)
            ctx.set_last_step_output("first", value, "only_first_replica")
            ctx.set_last_step_output("each", value, "none")
            ctx.set_non_tensor_output("objects", {"replicas": strategy.num_replicas_in_sync, "name": "n"})

        replicax.get_replica_context().merge_call(across, args=(mine,))

    for debugging in (False, True):
        iterator = iter(pair.distribute_dataset(numbered(3, size=4)))
        if debugging:
            with replicax.debug():
                ctx = pair.run_steps(step, iterator, 3)
        else:
            ctx = pair.run_steps(step, iterator, 3)
        outputs = ctx.last_step_outputs
        assert [float(outputs["sum"]), float(outputs["mean"]["nested"]), float(outputs["first"])] == [38.0, 19.0, 17.0]
        assert [float(v) for v in pair.local_results(outputs["each"])] == [17.0, 21.0]
        assert ctx.non_tensor_outputs == {"objects": {"replicas": 2, "name": "n"}}


@pytest.mark.parametrize("op", ["mean", "only_first_replica"])
def test_values_from_outside_the_step_are_not_combined_inside(pair, op) -> None:
    outside = pair.distribute_values_from_function(lambda ctx: 1.0 + ctx.replica_id_in_sync_group)

    def step(ctx, x):
        replicax.get_replica_context().merge_call(lambda strategy: ctx.set_last_step_output("of", outside, op))

    with pytest.raises(ValueError, match="inside a step only its own values can be combined"):
        pair.run_steps(step, iter(pair.distribute_dataset(numbered(3))), 2)


def test_variables_are_outputs(pair) -> None:
    with pair.scope():
        total = replicax.Variable(0, name="total", aggregation="sum")
        own = replicax.Variable(0, name="own", synchronization="on_read", aggregation="sum")

    def step(ctx, x):
        ctx.set_last_step_output("total", total.assign_add(x.size), "mean")
        replicax.get_replica_context().merge_call(
            lambda strategy: ctx.set_last_step_output("own", own.assign(4), "none"), args=()
        )

    ctx = pair.run_steps(step, iter(pair.distribute_dataset(numbered(2, size=4))), 2)
    assert {name: int(value) for name, value in ctx.last_step_outputs.items()} == {"total": 8, "own": 4}
    assert repr(ctx) == "MultiStepContext(steps=2, last_step_outputs=['own', 'total'], non_tensor_outputs=[])"


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("op", ["mean", "only_first_replica", "none"])
def test_a_number_of_python_is_an_array_with_a_dtype_of_its_own(pair, op, debug) -> None:
    def step(ctx, x):
        replicax.get_replica_context().merge_call(lambda strategy: ctx.set_last_step_output("two", 2.0, op))

    with replicax.debug() if debug else contextlib.nullcontext():
        found = pair.run_steps(step, iter(pair.distribute_dataset(numbered(3))), 2).last_step_outputs["two"]
    assert (float(found), found.weak_type) == (2.0, False)


@pytest.mark.parametrize("debug", [False, True])
def test_random_keys_of_the_first_replica(pair, debug) -> None:
    key = jax.random.key(3)

    def step(ctx, x):
        ctx.set_last_step_output("key", key, "only_first_replica")

    with replicax.debug() if debug else contextlib.nullcontext():
        found = pair.run_steps(step, iter(pair.distribute_dataset(numbered(3))), 2).last_step_outputs["key"]
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(key))


def test_steps_that_have_run_are_not_given_back_in_debug_mode(pair) -> None:
    def step(ctx, x):
        if int(x.max()) >= 4:
            raise KeyError("at the third")

    iterator = iter(pair.distribute_dataset(numbered(4)))
    with replicax.debug(), pytest.raises(KeyError, match="at the third"):
        pair.run_steps(step, iterator, 4)
    assert pair.gather(next(iterator), 0).tolist() == [4, 5]


def test_a_step_that_has_stored_its_values_is_not_given_back_in_debug_mode(pair, monkeypatch) -> None:
    with pair.scope():
        total = replicax.Variable(0.0, name="total", aggregation="sum")

    def store_and_interrupt(arrays):
        store_all(arrays)
        signal.raise_signal(signal.SIGINT)

    iterator = iter(pair.distribute_dataset(numbered(4)))
    with replicax.debug(), monkeypatch.context() as patch:
        patch.setattr(executor, "store_all", store_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            pair.run_steps(lambda ctx, x: total.assign_add(x.sum()), iterator, 2)
    assert float(total) == 1
    assert pair.gather(next(iterator), 0).tolist() == [2, 3]
