"""Many steps per dispatch, against the same steps one at a time."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax.variables.partitioners import over_all
from tests import processes
from tests.conftest import shared_strategy, strategy_of
from tests.many_steps import workers_steps
from tests.soaking import soak_except

pytestmark = pytest.mark.usefixtures("promotion_of_dtypes")


def devices(n: int) -> list[str]:
    return [f"cpu:{i}" for i in range(n)]


STRATEGIES: dict[str, Callable[[], replicax.Strategy]] = {
    "one device": lambda: replicax.OneDeviceStrategy("cpu:0"),
    "mirrored 2": lambda: strategy_of(2),
    "mirrored 4": lambda: strategy_of(4),
    "shared 4": lambda: shared_strategy(4, 2),
    "sharded 1": lambda: replicax.ShardedStrategy(devices(1)),
    "sharded 4": lambda: replicax.ShardedStrategy(devices(4), over_all(4, min_bytes=0)),
    "groups 4": lambda: replicax.ShardedStrategy(
        devices(4), replicax.variables.GroupPartitioner(2, over_all(2, min_bytes=0))
    ),
    "central 2": lambda: replicax.CentralStorageStrategy(devices(2), parameter_device="cpu:5"),
}


def batches(sizes: Iterable[int], seed: int = 0) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        {"x": rng.normal(size=(n, 6)).astype(np.float32), "y": rng.integers(0, 3, n).astype(np.int32)} for n in sizes
    ]


@dataclasses.dataclass
class Model:
    """Something to train, with each kind of variable."""

    strategy: replicax.Strategy
    traces: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(1)
        with self.strategy.scope():
            self.w = replicax.Variable(rng.normal(size=(6, 3)).astype(np.float32), name="w")
            self.b = replicax.Variable(np.zeros(3, np.float32), name="b")
            self.count = replicax.Variable(0, name="count")
            self.seen = replicax.Variable(0, name="seen", synchronization="on_read", aggregation="sum")
            self.average = replicax.Variable(
                np.zeros(6, np.float32), name="average", synchronization="on_read", aggregation="mean"
            )
            self.last = replicax.Variable(np.zeros(3, np.float32), name="last", trainable=False)
            self.optimizer = replicax.Optimizer(optax.sgd(0.05, momentum=0.9))

    def step(self, batch: Any) -> Any:
        self.traces += 1
        x, y = batch["x"], batch["y"]
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(7), self.count.value), (6,))

        def loss() -> Any:
            self.average.assign(0.9 * self.average.value + 0.1 * x.sum(0) / 8)
            logits = (x + 0.1 * noise[None]) @ self.w + self.b.value[None]
            return replicax.compute_average_loss(optax.softmax_cross_entropy_with_integer_labels(logits, y))

        share, grads = replicax.value_and_grad(loss, [self.w, self.b])()
        self.optimizer.apply_gradients(zip(grads, [self.w, self.b], strict=True))
        self.last.assign(grads_sum(grads[1]))  # written, never read
        self.count.assign_add(1)
        self.seen.assign_add(jnp.int32(x.shape[0]))
        return share

    def step_of_many(self, ctx: replicax.MultiStepContext, batch: Any) -> None:
        share = self.step(batch)
        ctx.set_last_step_output("loss", share, "sum")
        ctx.set_last_step_output("count", self.count.value, replicax.Aggregation.ONLY_FIRST_REPLICA)
        replicax.get_replica_context().merge_call(
            lambda _, value: ctx.set_last_step_output("shares", value), args=(share,)
        )

    def state(self) -> dict[str, Any]:
        slots = [v.read_value() for v in self.optimizer.variables if v.dtype == jnp.float32]
        floats = [self.w, self.b, self.average, self.last]
        return {
            "floats": [np.asarray(v.read_value()) for v in floats] + [np.asarray(x) for x in slots],
            "integers": [int(self.count), int(self.seen.read_value())],
        }


def grads_sum(gradient: Any) -> Any:
    return replicax.get_replica_context().all_reduce("sum", gradient)


def check_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["integers"] == b["integers"]
    for left, right in zip(a["floats"], b["floats"], strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-6 * max(1e-3, np.abs(right).max(initial=0)))


SEVEN = batches([8] * 7)
"""Elements, which are no multiple of three."""


@functools.cache
def one_at_a_time(kind: str) -> tuple[list[Any], dict[str, Any]]:
    """Each replica's share of each loss, and the state at the end."""
    one = Model(STRATEGIES[kind]())
    shares = [one.strategy.run(one.step, args=(b,)) for b in one.strategy.distribute_dataset(SEVEN)]
    return [one.strategy.local_results(share) for share in shares], one.state()


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", soak_except(STRATEGIES, "one device", "mirrored 2", "sharded 4"))
@pytest.mark.parametrize("steps", soak_except([1, 3, 7], 3, 7))
def test_the_same_as_one_at_a_time(kind, steps) -> None:
    shares, state = one_at_a_time(kind)
    many = Model(STRATEGIES[kind]())
    strategy = many.strategy
    iterator = iter(strategy.distribute_dataset(SEVEN))
    done = []
    while sum(done) < 7:
        ctx = strategy.run_steps(many.step_of_many, iterator, steps)
        done.append(ctx.steps)
        expected = shares[sum(done) - 1]
        np.testing.assert_allclose(strategy.local_results(ctx.last_step_outputs["shares"]), expected, rtol=2e-6)
        np.testing.assert_allclose(ctx.last_step_outputs["loss"], sum(map(float, expected)), rtol=2e-6)
        assert int(ctx.last_step_outputs["count"]) == sum(done)
    assert done == {1: [1] * 7, 3: [3, 3, 1], 7: [7]}[steps]
    with pytest.raises(StopIteration):
        strategy.run_steps(many.step_of_many, iterator, steps)
    check_same(many.state(), state)
    assert many.traces == strategy.extended.trace_count(many.step_of_many) == 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", soak_except(["one device", "mirrored 2", "sharded 4"], "mirrored 2"))
@pytest.mark.parametrize("partial", soak_except(["exact", "pad", "drop"], "exact", "pad"))
def test_a_last_batch_that_is_not_full(kind, partial) -> None:
    """Of 5 examples: over 2 and 4 replicas they are not even."""
    data, options = batches([8, 8, 8, 5]), replicax.InputOptions(partial_batch=partial)
    one, many = Model(STRATEGIES[kind]()), Model(STRATEGIES[kind]())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", replicax.errors.ExecutorWarning)
        for batch in one.strategy.distribute_dataset(data, options):
            one.strategy.run(one.step, args=(batch,))
        iterator = iter(many.strategy.distribute_dataset(data, options))

        def step(ctx: replicax.MultiStepContext, batch: Any) -> None:
            ctx.set_last_step_output("loss", many.step(batch), "sum")

        ctx = many.strategy.run_steps(step, iterator, 10)
    assert ctx.steps == (3 if partial == "drop" else 4)
    check_same(many.state(), one.state())


@pytest.mark.parametrize("partial", ["exact", "pad"])
def test_a_loop_has_no_transfer_of_its_own(pair, partial) -> None:
    """Also where single elements are taken of a group that was read for a call of several steps."""
    model = Model(pair)
    iterator = iter(pair.distribute_dataset(batches([8] * 9), replicax.InputOptions(partial_batch=partial)))

    def go_on() -> None:
        pair.run_steps(model.step_of_many, iterator, 2)
        pair.run(model.step, args=(next(iterator),))

    go_on()
    with jax.transfer_guard("disallow"):
        go_on()
        pair.run_steps(model.step_of_many, iterator, 3)
    assert int(model.count) == 9


def test_padded_outputs_have_the_mask_of_the_last_step(pair) -> None:
    data = [np.arange(4.0, dtype=np.float32), np.arange(4.0, 7.0, dtype=np.float32)]
    dataset = pair.distribute_dataset(data, replicax.InputOptions(partial_batch="pad"))

    def step(ctx, x):
        replicax.get_replica_context().merge_call(
            lambda strategy, v: (
                ctx.set_last_step_output("doubled", v),
                ctx.set_last_step_output("mean", strategy.reduce("mean", v, axis=0)),
            ),
            args=(2 * x,),
        )

    outputs = pair.run_steps(step, iter(dataset), 2).last_step_outputs
    assert float(outputs["mean"]) == 10.0
    assert pair.gather(outputs["doubled"], axis=0).tolist() == [8.0, 10.0, 12.0]
    next(iterator := iter(dataset))  # from then on elements are made one by one
    assert float(pair.run_steps(step, iterator, 1).last_step_outputs["mean"]) == 10.0
    first = pair.run_steps(step, iter(dataset), 1).last_step_outputs
    assert float(first["mean"]) == 3.0


def test_debugging_means_the_same() -> None:
    data, strategy = batches([8] * 3), strategy_of(2)

    def made() -> tuple[list[replicax.Variable], Any]:
        with strategy.scope():
            w = replicax.Variable(np.ones(6, np.float32), name="w")
            count = replicax.Variable(0, name="count")
            seen = replicax.Variable(0, name="seen", synchronization="on_read", aggregation="sum")

        def step(ctx: replicax.MultiStepContext, batch: Any) -> None:
            share, [gradient] = replicax.value_and_grad(
                lambda: replicax.compute_average_loss((batch["x"] * w.value[None]).sum(1)), [w]
            )()
            w.assign_sub(grads_sum(gradient))
            count.assign_add(1)
            seen.assign_add(jnp.int32(batch["x"].shape[0]))
            ctx.set_last_step_output("loss", share, "sum")
            ctx.set_last_step_output("count", count.value, replicax.Aggregation.ONLY_FIRST_REPLICA)
            replicax.get_replica_context().merge_call(
                lambda _, value: ctx.set_last_step_output("shares", value), args=(share,)
            )

        return [w, count, seen], step

    (compiled, step), (exact, exact_step) = made(), made()
    expected = strategy.run_steps(step, iter(strategy.distribute_dataset(data)), 3)
    iterator = iter(strategy.distribute_dataset(data))
    first = strategy.run_steps(exact_step, iterator, 1)  # the next ones are staged in groups now
    with replicax.debug():
        ctx = strategy.run_steps(exact_step, iterator, 2)
    assert (first.steps, ctx.steps) == (1, 2)
    assert int(ctx.last_step_outputs["count"]) == 3
    np.testing.assert_allclose(ctx.last_step_outputs["loss"], expected.last_step_outputs["loss"], rtol=1e-5)
    shares = [strategy.local_results(found.last_step_outputs["shares"]) for found in (ctx, expected)]
    np.testing.assert_allclose(*shares, rtol=1e-5)
    for a, b in zip(exact, compiled, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", [replicax.debug, jax.disable_jit])
def test_steps_are_plain_python_where_functions_are_not_compiled(mode: Any) -> None:
    strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    seen = []

    def step(ctx: Any, x: Any) -> None:
        seen.append(float(x.sum()))

    iterator = iter(strategy.distribute_dataset([np.arange(4.0), np.arange(4.0, 8.0)]))
    with mode():
        strategy.run_steps(step, iterator, 2)
    assert seen == [1.0, 5.0, 9.0, 13.0]


# --- programs -------------------------------------------------------------------------------------------


def test_one_trace_one_program_for_all_groups_of_a_length(pair) -> None:
    model = Model(pair)
    iterator = iter(pair.distribute_dataset(batches([8] * 12)))
    pair.run_steps(model.step_of_many, iterator, 4)
    [program] = [e for _, e in pair.extended.programs._entries.values() if e.repetitions]
    assert list(program.repetitions) == [4]
    assert program.call._cache_size() == 0  # the single step has not been compiled
    with jax.log_compiles(False):
        for _ in range(2):
            pair.run_steps(model.step_of_many, iterator, 4)
    assert program.repetitions[4].call._cache_size() == 1
    assert model.traces == 1


def test_a_plain_step_has_one_all_reduce_in_the_loop(pair) -> None:
    with pair.scope():
        w = replicax.Variable(np.ones((4, 4), np.float32))
        optimizer = replicax.Optimizer(optax.sgd(0.1))

    def step(ctx, x):
        loss, grads = replicax.value_and_grad(lambda: replicax.compute_average_loss(((x @ w) ** 2).sum(1)), [w])()
        optimizer.apply_gradients(zip(grads, [w], strict=True))
        ctx.set_last_step_output("loss", loss, "sum")

    pair.run_steps(step, iter(pair.distribute_dataset([np.ones((4, 4), np.float32)] * 3)), 3)
    [program] = [e for _, e in pair.extended.programs._entries.values() if e.repetitions]
    assert len(program.repetitions[3].collectives()) == 1
    assert "while(" in program.repetitions[3].compiled_text()


def test_scan_inside_and_a_key_that_is_carried(pair) -> None:
    with pair.scope():
        key = replicax.Variable(jax.random.key(0), name="key")
        state = replicax.Variable(np.zeros(2, np.float32), name="state")

    def draw(x):
        new, mine = jax.random.split(key.value)
        key.assign(new)

        def body(carry, row):
            return carry * 0.5 + row, carry

        last, _ = jax.lax.scan(body, state.value, replicax.get_replica_context().all_gather(x, axis=0))
        state.assign(last + jax.random.normal(mine, (2,)))
        return mine

    def step(ctx, x):
        mine = draw(x)
        ctx.set_last_step_output("key data", jax.random.key_data(mine), "only_first_replica")

    data = [np.full((4, 2), float(i), np.float32) for i in range(5)]
    ctx = pair.run_steps(step, iter(pair.distribute_dataset(data)), 5)
    found, key_found = state.numpy(), jax.random.key_data(key.value)
    key.assign(jax.random.key(0))
    state.assign(np.zeros(2, np.float32))
    for x in pair.distribute_dataset(data):
        last = pair.run(draw, args=(x,))
    np.testing.assert_allclose(found, state.numpy(), rtol=1e-6)
    np.testing.assert_array_equal(key_found, jax.random.key_data(key.value))
    np.testing.assert_array_equal(ctx.last_step_outputs["key data"], jax.random.key_data(last))


def test_a_step_that_creates_its_variables(pair) -> None:
    def step(ctx, x):
        count = replicax.Variable(0, name="count")
        count.assign_add(1)
        ctx.set_last_step_output("count", count.value, "only_first_replica")

    iterator = iter(pair.distribute_dataset([np.zeros(2)] * 5))
    counts = [int(pair.run_steps(step, iterator, k).last_step_outputs["count"]) for k in (2, 2, 5)]
    assert counts == [2, 4, 5]
    with replicax.debug():
        again = pair.run_steps(step, iter(pair.distribute_dataset([np.zeros(2)])), 1)
    assert int(again.last_step_outputs["count"]) == 6


def test_a_step_without_outputs_or_variables(pair) -> None:
    ctx = pair.run_steps(lambda ctx, x: None, iter(pair.distribute_dataset([np.zeros(2)] * 3)), 2)
    assert (ctx.last_step_outputs, ctx.non_tensor_outputs, ctx.steps) == ({}, {}, 2)


def test_a_decorator_that_gives_a_step_more_arguments(pair) -> None:
    with pair.scope():
        total = replicax.Variable(0.0, name="total")

    def step(ctx: Any, scale: float, x: Any) -> None:
        total.assign_add(replicax.get_replica_context().all_reduce("sum", scale * x.sum()))

    @functools.wraps(step)
    def doubled(ctx: Any, x: Any) -> None:
        step(ctx, 2, x)

    pair.run_steps(doubled, iter(pair.distribute_dataset([np.ones(4, np.float32)] * 2)), 2)
    assert float(total) == 16


def test_metrics_add_up(pair) -> None:
    with pair.scope():
        mean = replicax.Mean()

    def step(ctx, x):
        mean.update(x)

    pair.run_steps(step, iter(pair.distribute_dataset([np.arange(4.0), np.arange(4.0, 10.0)])), 2)
    assert float(mean.result()) == 4.5


# --- several workers ------------------------------------------------------------------------------------


def test_two_workers_do_what_one_does() -> None:
    workers = processes.run(workers_steps.train, workers=2, devices=2, timeout=240)
    alone = workers_steps.train(strategy_of(4))
    for worker in workers:
        assert worker["steps"] == alone["steps"] == [3, 3, 2, 0]
        assert worker["positions"] == alone["positions"] == [3, 6, 8]
        assert worker["counters"] == alone["counters"] == (8, 62)
        assert worker["traces"] == 2  # one program for full batches, and one for the last
        np.testing.assert_allclose(worker["losses"], alone["losses"], rtol=1e-6, atol=1e-6)  # sums of both signs
        np.testing.assert_allclose(worker["w"], alone["w"], rtol=1e-6)
    rows = workers[0]["rows"] | workers[1]["rows"]
    assert rows.keys() == alone["rows"].keys()
    expected = [alone["rows"][r] for r in sorted(rows)]
    np.testing.assert_allclose([rows[r] for r in sorted(rows)], expected, rtol=1e-6, atol=1e-6)


def test_workers_that_ask_for_other_numbers_of_steps() -> None:
    ours, theirs = processes.run(workers_steps.run_ahead, workers=2, devices=1, timeout=100)
    assert "2 times" in ours + theirs
    assert "3 times" in ours + theirs
