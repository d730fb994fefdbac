"""Gradient accumulation: the update of the large batch, in one all-reduce, with the memory of a small one."""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax.loop import Precision, accumulated
from tests.conftest import logical_strategy, shared_strategy, strategy_of
from tests.loop import models
from tests.soaking import soak_except

STRATEGIES = {
    "one": lambda: strategy_of(1),
    "two": lambda: strategy_of(2),
    "two on one device": lambda: shared_strategy(2, 1),
    "sharded": lambda: replicax.ShardedStrategy(["cpu:0", "cpu:1"]),
    "logical": lambda: logical_strategy(2, 2),
}


pytestmark = pytest.mark.usefixtures("promotion_of_dtypes")


class Line(models.Line):
    """A line whose step reads the weight before it is to change."""

    def step(self, batch: Any) -> Any:
        def loss() -> Any:
            losses = self.losses(batch)
            self.mean.update(losses)
            return replicax.compute_average_loss(losses)

        share, [gradient] = replicax.value_and_grad(loss, [self.w])()
        first = self.w.value[0, 0]
        self.optimizer.apply_gradients([(gradient, self.w)])
        return {"loss": share, "first weight": first}


def states_of(strategy: replicax.Strategy, parts: int, sizes: tuple[int, ...], input: Any = None, **run: Any) -> Any:
    """What a line is after a step on each batch, and the losses."""
    line, losses = Line(strategy), []
    for batch in line.dataset(sizes, input):
        out = strategy.run(accumulated(line.step, parts), args=(batch,), **run)
        several = isinstance(out["loss"], replicax.PerReplica)
        losses.append(float(strategy.reduce("sum", out["loss"])) if several else float(out["loss"]))
    return [*line.state()[:-1], line.mean.result(), np.float32(losses)]  # without the rows, which padding changes


@functools.cache
def of_large_batches(sizes: tuple[int, ...]) -> Any:
    """The same at once, on one device."""
    return states_of(strategy_of(1), 1, sizes)


@pytest.mark.covering(1)
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("name", soak_except(STRATEGIES, "two on one device", "sharded", "logical"))
def test_it_is_the_update_of_the_large_batch(name: str, parts: int) -> None:
    sizes = (24, 3)
    found = states_of(STRATEGIES[name](), parts, sizes)
    for mine, theirs in zip(found, of_large_batches(sizes), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-6, atol=2e-6)


@pytest.mark.covering(1)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("length", [8, 5])
@pytest.mark.parametrize("kept", [lambda fn: fn, jax.jit], ids=["plain", "jitted"])
@pytest.mark.parametrize("parts", [(2,), (2, 2)], ids=str)
def test_a_penalty_counts_once(replicas: int, length: int, kept: Any, parts: Any) -> None:
    strategy = strategy_of(replicas)
    x, w = np.arange(length * 3, dtype=np.float32).reshape(length, 3) / 10, np.float32([1.0, -2.0, 3.0])
    with strategy.scope():
        v = replicax.Variable(w, name="v")
        optimizer = replicax.Optimizer(optax.sgd(0.1))

    def step(x: Any) -> Any:
        def loss() -> Any:
            penalty = kept(replicax.scale_regularization_loss)(jnp.sum(jnp.square(v.value)))
            return replicax.compute_average_loss(x @ v.value) + penalty, penalty

        (share, penalty), gradients = replicax.value_and_grad(loss, [v], has_aux=True)()
        optimizer.apply_gradients(zip(gradients, [v], strict=True))
        return share, penalty

    [batch] = strategy.distribute_dataset([x])
    numbers = strategy.run(functools.reduce(accumulated, parts, step), args=(batch,))
    expected, gradient = np.mean(x @ w) + np.sum(w**2), np.mean(x, axis=0) + 2 * w
    loss, penalty = (float(strategy.reduce("sum", n)) for n in numbers)
    np.testing.assert_allclose(v.numpy(), w - 0.1 * gradient, rtol=1e-5)
    assert (loss, penalty) == (pytest.approx(float(expected)), pytest.approx(14.0))


def test_the_example_mask_leaves_the_padding_of_micro_batches_out_of_own_sums() -> None:
    strategy = strategy_of(2)
    x = np.arange(1, 6, dtype=np.float32)

    def step(x: Any) -> Any:
        mask = replicax.get_replica_context().example_mask
        return replicax.as_share(jnp.sum(jnp.where(mask, x, 0.0)) / 5)

    [batch] = strategy.distribute_dataset([x])
    assert float(strategy.reduce("sum", strategy.run(accumulated(step, 2), args=(batch,)))) == 3.0


def test_gradients_of_some_rows_are_accumulated() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        w = replicax.Variable(jnp.zeros((4, 2)))
        optimizer = replicax.Optimizer(optax.sgd(1.0))

    def step(rows: Any) -> None:
        gradient = jax.grad(lambda x: replicax.compute_average_loss(4 * x.sum(1)))(w.value[rows])
        optimizer.apply_gradients([(replicax.IndexedSlices(gradient, rows, (4, 2)), w)])

    [batch] = strategy.distribute_dataset([np.int32([0, 1, 1, 3])])
    strategy.run(accumulated(step, 2), args=(batch,))
    assert w.numpy().tolist() == [[-1, -1], [-2, -2], [0, 0], [-1, -1]]


def test_micro_batches_share_the_variables_that_a_step_creates() -> None:
    strategy = strategy_of(2)

    def step(x: Any) -> Any:
        count = replicax.Variable(lambda: jnp.zeros(()), name="count")
        count.assign_add(1.0)
        return count.value

    [batch] = strategy.distribute_dataset([np.ones(8, np.float32)])
    counts = [strategy.run(accumulated(step, 2), args=(batch,)) for _ in range(3)]
    assert list(map(float, counts)) == [2, 4, 6]


@pytest.mark.parametrize("name", ["two", "two on one device"])
def test_each_micro_batch_draws_numbers_of_its_own(name: str) -> None:
    strategy = STRATEGIES[name]()
    with strategy.scope():
        drawn = replicax.Variable(np.zeros(12, np.float32), synchronization="on_read", aggregation="sum")

    def step(key: Any, rows: Any) -> None:
        key = replicax.get_replica_context().random_key(key)
        drawn.assign(drawn.value.at[rows].set(jax.random.uniform(key, rows.shape)))

    [rows] = strategy.distribute_dataset([np.arange(12)])
    seen = []
    for parts in ((3,), (2, 3)):
        strategy.run(functools.reduce(accumulated, parts, step), args=(jax.random.key(0), rows))
        seen.append(len(set(drawn.numpy())))
    assert seen == [12] * 2


ON_GRADIENTS: dict[str, Any] = {
    "gradients / count": lambda count, total: lambda g: g / jnp.maximum(count, 1),
    "gradients * (1 / count)": lambda count, total: lambda g: (1 / count) * g,
    "gradients, jitted": lambda count, total: jax.jit(lambda g: (g / count).astype(g.dtype)),
    "gradients / total": lambda count, total: lambda g: g / total,
    "gradients / norm": lambda count, total: lambda g: g / jnp.linalg.norm(g),
    "gradients if finite": lambda count, total: lambda g: jnp.where(jnp.isfinite(g / count), g, jnp.zeros_like(g)),
}


def of_tokens(strategy: replicax.Strategy, parts: int, how: str, masks: Any) -> Any:
    """A weight after a step with the mean over tokens, and the loss."""
    with strategy.scope():
        w = replicax.Variable(1.0, name="w")
        optimizer = replicax.Optimizer(optax.sgd(1.0))

    def step(batch: Any) -> Any:
        mask = batch["mask"]
        in_part = replicax.get_replica_context().all_reduce("sum", mask.sum())

        def loss() -> Any:
            losses = jnp.square(w - batch["x"]) * mask
            if how.startswith("gradients"):
                return replicax.as_share(losses.sum())
            if how == "as_share":
                return replicax.as_share(1 / in_part * losses.sum())
            count = batch["tokens"][0] if how == "column" else in_part
            return replicax.compute_average_loss(losses.sum(1), global_batch_size=count)

        share, gradients = replicax.value_and_grad(loss, [w])()
        if how in ON_GRADIENTS:
            gradients = jax.tree.map(ON_GRADIENTS[how](mask.sum(), batch["tokens"][0]), gradients)
        optimizer.apply_gradients(zip(gradients, [w], strict=True))
        return share

    x = np.arange(masks.size, dtype=np.float32).reshape(masks.shape) / masks.size
    tokens = np.full(len(masks), masks.sum(), np.int32)
    [batch] = strategy.distribute_dataset([{"x": x, "mask": masks, "tokens": tokens}])
    share = strategy.run(accumulated(step, parts), args=(batch,))
    return float(w), sum(map(float, strategy.local_results(share)))


def test_a_mean_over_the_tokens_of_a_micro_batch_is_told_with_its_cures() -> None:
    masks = (np.random.default_rng(0).random((8, 3)) < 0.4).astype(np.float32)
    whole = of_tokens(strategy_of(1), 1, "sum", masks)
    expected = pytest.approx(whole)
    for how in list(ON_GRADIENTS)[4:]:  # not divided by a sum over examples
        of_tokens(strategy_of(1), 2, how, masks)
    for replicas in (1, 2):
        for how in ("sum", "as_share", *list(ON_GRADIENTS)[:3]):
            what = "gradients" if how in ON_GRADIENTS else "loss"
            said = rf"the {what} at .*accumulation.py.* divided by a sum over one micro"
            with pytest.raises(ValueError, match=said):
                of_tokens(strategy_of(replicas), 2, how, masks)
        assert of_tokens(strategy_of(replicas), 2, "column", masks) == expected
        w, _ = of_tokens(strategy_of(replicas), 2, "gradients / total", masks)
        assert w == pytest.approx(whole[0], rel=1e-5)
    assert of_tokens(shared_strategy(4, 2), 1, "sum", masks) == expected


@pytest.mark.parametrize("replicas", [1, 2])
def test_ratios_that_are_no_means_over_the_tokens_of_a_micro_batch(replicas: int) -> None:
    """Of the sums of one example, in loops; by the number of replicas; in a penalty for each micro-batch."""
    strategy, rows = strategy_of(replicas), np.arange(1, 25, dtype=np.float32).reshape(8, 3)
    with strategy.scope():
        w = replicax.Variable(np.ones(3, np.float32), name="w")
        optimizer = replicax.Optimizer(optax.sgd(0.1))

    def loss_of(x: Any) -> Any:
        norms = jnp.sum(x, axis=1)
        ratios = sum(jnp.sum(row * w) / jnp.sum(row) + jnp.sum(w) / norms[i] for i, row in enumerate(x))
        again = jax.lax.scan(lambda total, row: (total + jnp.sum(row * w + w) / jnp.sum(row), None), 0.0, x)[0]
        share = (ratios + again) / 2 / replicax.get_replica_context().all_reduce("sum", 1) / (8 / replicas)
        return replicax.as_share(share) + replicax.scale_regularization_loss(
            jnp.sum(w**2) * jnp.sum(x) / jnp.sum(norms)
        )

    def step(x: Any) -> None:
        _, gradients = replicax.value_and_grad(lambda: loss_of(x), [w])()
        optimizer.apply_gradients(zip(gradients, [w], strict=True))

    [batch] = strategy.distribute_dataset([rows])
    strategy.run(accumulated(step, 2), args=(batch,))
    sums = rows.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(w.numpy(), 0.8 - 0.1 * np.mean((rows + 1) / sums, axis=0), rtol=1e-5)


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", ["value_and_grad", "jax.grad", "jitted", "nnx"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_update_of_ones_own_with_gradients_of_plain_means_is_told(replicas: int, how: str) -> None:
    nnx = pytest.importorskip("flax.nnx")
    strategy = strategy_of(replicas)
    with strategy.scope():
        w = replicax.Variable(np.ones(3, np.float32), name="w")
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    def averaged(gradient: Any) -> Any:
        return replicax.get_replica_context().all_reduce("mean", gradient)

    def gradient_of(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: jnp.mean(jnp.square(x @ w)))(w)

    def step(model: Any, x: Any) -> None:
        if how == "nnx":
            gradients = averaged(nnx.grad(lambda model: jnp.mean(jnp.square(model(x))))(model))
            nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), gradients))
        elif how == "value_and_grad":
            _, [gradient] = replicax.value_and_grad(lambda: jnp.mean(jnp.square(x @ w)), [w])()
            w.assign_sub(0.1 * averaged(gradient))
        else:
            w.assign_sub(0.1 * averaged((jax.jit(gradient_of) if how == "jitted" else gradient_of)(w.value, x)))

    with pytest.raises(ValueError, match=r"calls no apply_gradients .*: update with an optimizer"):
        strategy.run(accumulated(step, 2), args=(model, np.ones((4, 3), np.float32)))
    np.testing.assert_array_equal(w.numpy(), 1.0)


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit, jax.checkpoint])
def test_gradients_that_are_only_measured_need_no_optimizer(wrap: Any) -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        w = replicax.Variable(np.float32(3.0), name="w")
        batches, total = replicax.Variable(np.float32(0.0)), replicax.Variable(np.float32(0.0))

    @wrap
    def measured(batches: Any, total: Any, w: Any, x: Any) -> tuple[Any, Any]:
        def of_row(count: Any, row: Any) -> tuple[Any, Any]:
            return count + 0.25, jax.grad(lambda w: row * w * w)(w)

        batches, slopes = jax.lax.scan(of_row, batches, x)
        return batches, total + replicax.get_replica_context().all_reduce("sum", jnp.sum(slopes))

    def step(x: Any) -> None:
        for variable, value in zip((batches, total), measured(batches.value, total.value, w.value, x), strict=True):
            variable.assign(value)

    strategy.run(accumulated(step, 2), args=(next(iter(strategy.distribute_dataset([np.ones(16, np.float32)]))),))
    assert (batches.numpy(), total.numpy()) == (2.0, 96.0)


def test_a_measure_that_is_a_derivative_goes_on_from_one_micro_batch_to_the_next() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        w = replicax.Variable(2.0)
        slopes = replicax.Variable(0.0)

    def step(x: Any) -> None:
        slope = jax.vmap(jax.grad(lambda x: jnp.sin(w.value * x)))
        slopes.assign_add(replicax.get_replica_context().all_reduce("sum", jnp.sum(slope(x))))
        slopes.assign_add(
            replicax.get_replica_context().all_reduce("sum", jax.grad(lambda x: jnp.sum(w.value * x))(x).sum())
        )

    x = np.arange(8, dtype=np.float32)
    [batch] = strategy.distribute_dataset([x])
    strategy.run(accumulated(step, 2), args=(batch,))
    np.testing.assert_allclose(slopes.numpy(), (2 * np.cos(2 * x)).sum() + 16, rtol=1e-5)


def test_a_variable_that_the_step_makes_is_one_for_all_micro_batches() -> None:
    strategy = strategy_of(2)
    made: list[replicax.Variable] = []

    def step(x: Any) -> None:
        if not made:
            made.append(replicax.Variable(np.float32(0.0), name="total"))
        made[0].assign_add(replicax.get_replica_context().all_reduce("sum", x.sum()))

    for batch in strategy.distribute_dataset([np.ones(8, np.float32)] * 2):
        strategy.run(accumulated(step, 2), args=(batch,))
    assert float(made[0]) == 16.0


@pytest.mark.parametrize(("how", "sizes"), [("per replica", (3, 1)), ("padded", (11, 1))])
def test_so_it_is_replica_by_replica_and_of_padded_batches(how: str, sizes: tuple[int, ...]) -> None:
    options = replicax.InputOptions(partial_batch="pad") if how == "padded" else None
    run = {"options": replicax.RunOptions(executor="per_replica")} if how == "per replica" else {}
    found = states_of(strategy_of(2), 3 if options else 2, sizes, options, **run)
    for mine, theirs in zip(found, of_large_batches(sizes), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["two", "sharded"])
def test_one_all_reduce_and_one_update(name: str) -> None:
    found = []
    for parts in (1, 4):
        strategy = STRATEGIES[name]()
        line = Line(strategy)
        batch = next(iter(line.dataset((16,))))
        kinds = strategy.extended.trace(accumulated(line.step, parts), args=(batch,)).collectives()
        found.append(sorted((c.kind, c.bytes) for c in kinds))
        strategy.run(accumulated(line.step, parts), args=(batch,))
        assert [int(v.value) for v in line.optimizer.variables if v.dtype == jnp.int32] == [1]
    assert found[0] == found[1]


def test_the_activations_of_one_micro_batch_are_in_memory() -> None:
    strategy = strategy_of(1)
    with strategy.scope():
        ws = replicax.as_variables([np.ones((64, 64), np.float32)] * 6)
        optimizer = replicax.Optimizer(optax.sgd(0.1))

    def step(x: Any) -> Any:
        def loss_of() -> Any:
            h = x
            for w in ws:
                h = jnp.tanh(h @ w.value)
            return replicax.compute_average_loss(h.sum(1))

        loss, gradients = replicax.value_and_grad(loss_of, ws)()
        optimizer.apply_gradients(gradients, ws)
        return loss

    x = np.ones((8192, 64), np.float32)
    sizes = []
    for parts in (1, 8):
        compiled = strategy.extended.trace(accumulated(step, parts), args=(x,)).compiled()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert sizes[1] < sizes[0] / 3


def test_numbers_of_micro_batches_become_those_of_the_batch() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        count = replicax.Variable(0, name="count", trainable=False)

    def step(x: Any) -> Any:
        count.assign(count.value + 1)
        return {
            "share": replicax.compute_average_loss(x),
            "nested": {"mean": jnp.mean(x)},
            "rate": 0.5,
            "decay": np.float32(0.25),
            "count": count.value,
            "rows": jnp.float32(x.shape[0]),
        }

    dataset = strategy.distribute_dataset([np.arange(16.0, dtype=np.float32)])
    run = replicax.train(
        step, dataset, 1, accumulate=4, reduce={"nested/mean": "mean"}, progress=False, log_every=1
    )  # fmt: skip
    del run.numbers["examples_per_second"]
    assert run.numbers == {"share": 7.5, "nested/mean": 7.5, "rate": 0.5, "decay": 0.25, "count": 4.0, "rows": 2.0}


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_number_that_micro_batches_can_not_add_up_is_told(replicas: int) -> None:
    strategy = strategy_of(replicas)
    with strategy.scope():
        w = replicax.Variable(np.ones(3, np.float32))
        optimizer = replicax.Optimizer(optax.sgd(0.1))

    def step(x: Any) -> Any:
        def summed(value: Any) -> Any:
            return replicax.get_replica_context().all_reduce("sum", value)

        loss, [gradient] = replicax.value_and_grad(lambda: replicax.compute_average_loss((x @ w) ** 2), [w])()
        centred = x - summed(x.sum(0, keepdims=True)) / 8  # as in a batch norm over all replicas
        length = jnp.linalg.norm(w)
        optimizer.apply_gradients([(gradient, w)])
        return {
            "norm": jnp.linalg.norm(summed(gradient)),
            "perplexity": jnp.exp(summed(loss)),
            "declared": jnp.sqrt(summed(loss)),
            "total": 2 * summed(loss),
            "moved": jnp.cumsum(jnp.stack([jax.lax.stop_gradient(summed(loss)), summed(loss)]))[-1],
            "finite": jnp.nan_to_num(summed(loss)),
            "length": length,
            "large": (summed(loss) > 1e9).astype(jnp.float32),
            "own": jnp.sum(centred**2),
            "scaled": summed(jnp.sum(x * jnp.exp(-summed(loss)))),
            "share": replicax.compute_average_loss(jnp.sum(centred**2, axis=1)),
        }

    dataset = strategy.distribute_dataset([np.ones((8, 3), np.float32)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replicax.train(step, dataset, 1, accumulate=2, reduce={"declared": "mean"}, progress=False)
    told = [str(w.message) for w in caught if "nonlinear function of sums over the replicas" in str(w.message)]
    assert [message.split("'")[1] for message in told] == ["norm", "perplexity"]
    assert "train(reduce={'norm': 'mean'})" in told[0]


def test_what_follows_micro_batches_in_a_step_has_the_whole_batch() -> None:
    loss = jax.jit(replicax.compute_average_loss)  # whose programs JAX keeps

    def both(x: Any) -> Any:
        return accumulated(loss, 3)(x), loss(x), loss(x[:2])

    strategy = strategy_of(2)
    [batch] = strategy.distribute_dataset([np.arange(7.0, dtype=np.float32)])
    found = [float(strategy.reduce("sum", x)) for x in strategy.run(both, args=(batch,))]
    assert found == pytest.approx([3.0, 3.0, 2.5])


def test_in_a_mean_of_micro_batches_each_example_counts_once() -> None:
    def step(x: Any) -> Any:
        mask = replicax.get_replica_context().example_mask
        return jnp.sum(jnp.where(mask, x, 0.0)) / jnp.sum(mask)

    x = np.array([0, 0, 0, 5, 5], np.float32)  # of which the second micro-batch has two
    assert float(strategy_of(1).run(accumulated(step, 2, mean=True), args=(x,))) == 2.0


@pytest.mark.parametrize(
    ("kind", "per_call"),
    [
        (None, 4),
        ("fp16", 1),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in [(None, 1), ("fp16", 4), ("bf16", 1), ("bf16", 4)]),
    ],
)
def test_train_accumulates_joined_or_not_in_any_precision(kind: Any, per_call: int) -> None:
    found = []
    for parts, calls in ((1, 1), (4, per_call)):
        line = Line(strategy_of(2))
        with line.strategy.scope():
            precision = Precision("fp16", loss_scale=64.0) if kind == "fp16" else kind
        run = replicax.train(
            line.step, line.dataset((16, 16, 16, 6)), 8, log_every=4, accumulate=parts, steps_per_call=calls,
            precision=precision, progress=False,
        )  # fmt: skip
        found.append([*line.state()[:-1], run.numbers["loss"]])
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(
            mine, theirs, rtol=2e-6 if kind is None else 2e-2, atol=2e-6 if kind is None else 2e-2
        )


def test_micro_batches_that_are_mostly_padding_are_told() -> None:
    line = Line(strategy_of(2))
    said = r"a replica's batch of 2 row\(s\) is padded to 5, to divide into 5 .* 60% .* at most accumulate=2"
    with pytest.warns(UserWarning, match=said):
        replicax.train(line.step, line.dataset((4,)), 1, accumulate=5, progress=False)
    replicax.train(line.step, line.dataset((6, 4)), 2, accumulate=5, progress=False)
    replicax.train(line.step, line.dataset((5,)), 1, accumulate=6, progress=False)  # one replica has 3, one has 2


def test_a_batch_that_overflows_in_one_micro_batch_is_skipped_as_a_whole() -> None:
    line = Line(strategy_of(2))
    with line.strategy.scope():
        precision = Precision("fp16")
    data = line.batches((16,))
    data[0]["y"][3] = np.inf
    for batch in line.strategy.distribute_dataset(data):
        line.strategy.run(precision(accumulated(line.step, 4)), args=(batch,))
    assert precision.loss_scale == 2.0**14
    assert not line.w.numpy().any()
    assert float(line.mean.result()) == 0.0
    with pytest.raises(ValueError, match=r"Wrap the other way round: precision\(accumulated\(step, 4\)\)"):
        line.strategy.run(accumulated(precision(line.step), 4), args=(batch,))


def test_precision_without_a_loss_scale_may_be_inside_or_outside() -> None:
    half, found = Precision("bf16"), []
    for wrapped in (lambda step: half(accumulated(step, 4)), lambda step: accumulated(half(step), 4)):
        line = Line(strategy_of(2))
        for batch in line.dataset((16,)):
            line.strategy.run(wrapped(line.step), args=(batch,))
        found.append(line.state()[:-1])
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-2, atol=1e-2)


def test_what_can_not_be_accumulated_is_told() -> None:
    strategy = strategy_of(1)
    with strategy.scope():
        w = replicax.Variable(1.0, name="w")
        optimizer = replicax.Optimizer(optax.sgd(0.1))
        searched = replicax.Optimizer(optax.polyak_sgd())

    def mean(x: Any) -> Any:
        _, gradients = replicax.value_and_grad(lambda: jnp.mean(x * w.value), [w])()
        optimizer.apply_gradients(zip(gradients, [w], strict=True))

    def share(x: Any) -> Any:
        return replicax.value_and_grad(lambda: replicax.compute_average_loss(x * w.value), [w])()

    def of_part(x: Any) -> Any:
        return replicax.compute_average_loss(x, global_batch_size=len(x))

    def read_later(x: Any) -> Any:
        _, gradients = share(x)
        optimizer.apply_gradients(zip(gradients, [w], strict=True))
        return w.value

    def by_itself(x: Any) -> Any:
        _, [gradient] = share(x)
        w.assign_sub(0.1 * replicax.get_replica_context().all_reduce("sum", gradient))

    def with_value(x: Any) -> Any:
        loss, gradients = share(x)
        searched.apply_gradients(gradients, [w], value=loss)

    x = np.ones(8, np.float32)
    for step, error, match in (
        (mean, ValueError, "end it with replicax.compute_average_loss"),
        (of_part, ValueError, r"size=4 is the size of one micro-batch.* whole batch, 8, or .* pass jnp.asarray\(4"),
        (read_later, replicax.errors.TraceError, "'w'.* is read after apply_gradients.*once for the whole batch"),
        (by_itself, ValueError, "differentiates its loss, and calls no apply_gradients"),
        (with_value, ValueError, "the argument 'value' of the transformation"),
        (lambda x: x, ValueError, "returns numbers, got"),
        (lambda x: {"name": "adam"}, ValueError, "returns numbers, got 'adam'"),
    ):
        with pytest.raises(error, match=match):
            strategy.run(accumulated(step, 2), args=(x,))
    labelled = accumulated(lambda x: replicax.compute_average_loss(x, global_batch_size=jnp.asarray(4)), 2)
    assert float(strategy.run(labelled, args=(x,))) == 2.0
    with pytest.raises(TypeError, match=r"mean must be a list of keys, or True, got 'loss'; for one: mean=\[key\]"):
        accumulated(len, 2, mean="loss")
    with pytest.raises(TypeError, match=r"mean must be a list of keys, or True, got \[1\]"):
        accumulated(len, 2, mean=[1])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="returns no number called 'typo'; it returns 'loss', 'rows'"):
        strategy.run(accumulated(lambda x: {"loss": x.sum(), "rows": 1}, 2, mean=["loss", "typo"]), args=(x,))
    with pytest.raises(ValueError, match="parts must be an int of at least 1"):
        accumulated(with_value, 0)
    with pytest.raises(ValueError, match=r"of 2 lengths, \[4, 8\]"):
        strategy.run(accumulated(lambda x, y: None, 2), args=(x, x[:4]))
    with pytest.raises(
        ValueError, match=r"of 2 lengths, \[2, 8\]. If one is a random key, make it with jax.random.key,"
    ):
        strategy.run(accumulated(lambda x, key: None, 2), args=(x, jax.random.PRNGKey(0)))
    tokens = np.ones((4, 3), np.float32)
    with pytest.raises(
        ValueError, match=r"micro-batch of accumulated gradients, of 2 rows, .* got shape \(6,\).*\[batch, time\]"
    ):
        strategy.run(accumulated(lambda x: share(x.reshape(-1))[0], 2), args=(tokens,))
    with pytest.raises(ValueError, match="must all have one length there; the step got none"):
        strategy.run(accumulated(lambda x: None, 2), args=(1.0,))
    with strategy.scope(), pytest.raises(replicax.errors.ContextError, match=r"strategy.run\(accumulated\(step, 2\)"):
        accumulated(share, 2)(x)


def test_outside_every_scope_a_step_takes_numpy_arrays() -> None:
    assert float(accumulated(replicax.compute_average_loss, 2)(np.arange(5, dtype=np.float32))) == 2.0


@pytest.mark.parametrize(
    ("replicas", "kind"),
    [(2, "fp16"), *(pytest.param(*each, marks=pytest.mark.soak) for each in [(1, None), (2, None), (1, "fp16")])],
)
def test_models_of_nnx(replicas: int, kind: Any) -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.first = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(1))
            self.last = nnx.Linear(8, 1, rngs=nnx.Rngs(2))

        def __call__(self, x: Any) -> Any:
            return self.last(jnp.tanh(self.first(x)))[:, 0]

    found = []
    for parts in (1, 3):
        strategy = strategy_of(replicas)
        with strategy.scope():
            model, precision = Net(), Precision("fp16", loss_scale=64.0)
            optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
            metric = nnx.metrics.Average("loss")

        def step(model: Any, optimizer: Any, metric: Any, batch: Any, precision: Any = precision) -> Any:
            def loss_fn(model: Any) -> Any:
                losses = jnp.square(model(batch["x"].astype(jnp.float32)) - batch["y"][:, 0])
                loss = replicax.compute_average_loss(losses)
                return (loss if kind is None else precision.scale(loss)), losses

            (_, losses), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model)
            metric.update(loss=losses)
            optimizer.update(model, gradients if kind is None else precision.unscale(gradients))

        chosen: Any = accumulated(step, parts) if kind is None else precision(accumulated(step, parts))
        for batch in Line(strategy).dataset((12, 12, 12)):
            strategy.run(chosen, args=(model, optimizer, metric, batch))
        assert int(optimizer.step[...]) == 3
        if replicas > 1:
            program = strategy.extended.trace(chosen, args=(model, optimizer, metric, batch))
            large = [c for c in program.collectives() if c.kind == "all-reduce" and c.bytes > 64]
            assert len(large) == 1
        state = jax.tree.leaves(nnx.state((model, optimizer, metric)))
        found.append([np.asarray(x) for x in state])
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5 if kind is None else 2e-3)


def test_parameters_of_nnx_can_not_be_used_after_the_update() -> None:
    nnx = pytest.importorskip("flax.nnx")
    strategy = strategy_of(2)
    with strategy.scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.All(nnx.Param, nnx.PathContains("kernel")))
        average = nnx.clone(model)
        kept = replicax.Variable(np.zeros((3, 1), np.float32))
    start = np.asarray(model.kernel[...])

    def trained(later: Any, jit: Any = lambda step: step) -> Any:
        def step(model: Any, optimizer: Any, average: Any, x: Any) -> Any:
            def loss_fn(model: Any) -> Any:
                return replicax.compute_average_loss(jnp.square(model(x))[:, 0])

            wrt = nnx.DiffState(0, optimizer.wrt)
            optimizer.update(model, nnx.grad(loss_fn, argnums=wrt)(model))
            return later(model, average) if later is not counted else later(optimizer)

        [x] = strategy.distribute_dataset([np.ones((8, 3), np.float32)])
        return strategy.run(accumulated(jit(step), 2), args=(model, optimizer, average, x))

    def averaged(model: Any, average: Any) -> None:
        nnx.update(average, jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, nnx.state(average), nnx.state(model)))

    def assigned(model: Any, average: Any) -> None:
        model.kernel[...] = jnp.zeros((3, 1))

    def copied(model: Any, average: Any) -> None:
        average.kernel[...] = model.kernel[...]

    def stored(model: Any, average: Any) -> None:
        kept.assign(model.kernel[...])

    def counted(optimizer: Any) -> Any:
        return optimizer.step[...]

    for later, what in (
        (averaged, "linear/kernel is read at .*test_accumulation.py"),
        (assigned, "linear/kernel is written"),
        (copied, "linear/kernel is read"),
        (stored, "linear/kernel is read"),
        (counted, "optimizer/step is read"),
    ):
        with pytest.raises(replicax.errors.TraceError, match=f"{what}.* after apply_gradients, or"):
            trained(later)
    with pytest.raises(TypeError, match="must be arguments of the step, .* or nnx.jit, which you can leave out"):
        trained(lambda model, average: None, nnx.jit)
    np.testing.assert_array_equal(model.kernel[...], start)
    trained(lambda model, average: model.bias[...].sum())  # which this optimizer leaves as it is
    assert (model.kernel[...] != start).all()


def test_an_nnx_optimizer_may_have_its_model() -> None:
    nnx = pytest.importorskip("flax.nnx")
    strategy = strategy_of(2)
    [x] = strategy.distribute_dataset([np.arange(24, dtype=np.float32).reshape(8, 3)])

    def step(optimizer: Any, x: Any) -> None:
        loss_fn = nnx.grad(lambda model: replicax.compute_average_loss(jnp.square(model(x))[:, 0]))
        optimizer.update(loss_fn(optimizer.model))

    found = []
    for parts in (1, 2):
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.ModelAndOptimizer(model, optax.sgd(0.001), wrt=nnx.Param)
        strategy.run(accumulated(step, parts), args=(optimizer, x))
        found.append(model.kernel[...])
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_an_nnx_optimizer_with_rates_for_each_layer_and_constants_in_its_model() -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.body, self.head = nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 1, rngs=nnx.Rngs(1))
            self.powers = nnx.data(np.array([1, 2]))
            self.cache = nnx.Variable(None)

        def __call__(self, x: Any) -> Any:
            return self.head(jnp.tanh(self.body(x)))[:, 0] ** int(self.powers[1])

    def rates(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "fast" if "head" in str(path) else "slow", params)

    layers = optax.multi_transform({"fast": optax.adam(0.1), "slow": optax.sgd(0.01)}, rates)

    def step(model: Any, optimizer: Any, x: Any, own: str = "") -> None:
        optimizer.update(model, nnx.grad(lambda model: replicax.compute_average_loss(model(x)))(model))
        if own:
            setattr(model, own, nnx.data(jnp.ones(2)) if own == "powers" else nnx.Variable(jnp.ones(2)))

    x = np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)
    strategy = strategy_of(2)
    with strategy.scope():
        model = Net()
        optimizer = nnx.Optimizer(model, layers, wrt=nnx.Param)
    definition, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def updated(params: Any) -> Any:
        gradients = jax.grad(lambda params: nnx.merge(definition, params, rest)(x).mean())(params)
        return optax.apply_updates(params, layers.update(gradients, layers.init(params), params)[0])

    expected = jax.tree.leaves(updated(jax.tree.map(np.asarray, params)))
    [batch] = strategy.distribute_dataset([x])
    strategy.run(accumulated(step, 2), args=(model, optimizer, batch))
    for mine, theirs in zip(jax.tree.leaves(nnx.state(model, nnx.Param)), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    for name in ("powers", "cache"):
        with pytest.raises(TypeError, match=f"net/{name} was changed by the step, but it is not an array in an nnx.Va"):
            strategy.run(accumulated(step, 2), args=(model, optimizer, batch, name))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_number_in_a_metric_of_nnx_counts_once_for_all_micro_batches(replicas: int) -> None:
    from flax import nnx

    def step(metrics: Any, x: Any) -> None:
        metrics.update(loss=replicax.compute_average_loss(x), logits=jnp.stack([x, 1 - x], 1), labels=jnp.int32(x < 5))

    strategy = strategy_of(replicas)
    means = nnx.metrics.Average("loss")
    metrics = nnx.MultiMetric(loss=means, accuracy=nnx.metrics.Accuracy())
    for batch in strategy.distribute_dataset([np.arange(12, dtype=np.float32)]):
        strategy.run(accumulated(step, 3), args=(metrics, batch))
        with pytest.raises(ValueError, match=r"Welford.update, .* loss is a number of one micro-batch.*an array"):
            strategy.run(accumulated(step, 3), args=(nnx.MultiMetric(spread=nnx.metrics.Welford("loss")), batch))
        with pytest.raises(ValueError, match=r"Welford.update: a micro-batch .* may be padded.* or update it in anoth"):
            strategy.run(accumulated(lambda metric, x: metric.update(x=x), 3), args=(nnx.metrics.Welford("x"), batch))
    assert (float(means.compute()), int(means.count[...]), int(metrics.accuracy.count[...])) == (5.5, 1, 12)


def test_metrics_of_nnx_are_one_program_of_uneven_batches_too() -> None:
    from flax import nnx

    def step(metrics: Any, x: Any, later: Any = lambda metrics: None) -> Any:
        metrics.update(loss=replicax.compute_average_loss(x), logits=jnp.stack([x, 1 - x], 1), labels=jnp.int32(x < 5))
        metrics.update(loss=replicax.compute_average_loss(x), logits=jnp.stack([1 - x, x], 1), labels=jnp.int32(x < 5))
        return later(metrics)

    strategy = strategy_of(2)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    data = [np.arange(12, dtype=np.float32), np.arange(7, dtype=np.float32)]
    for batch in strategy.distribute_dataset(data):
        strategy.run(accumulated(step, 3), args=(metrics, batch))
    assert (float(metrics.loss.compute()), int(metrics.loss.count[...])) == (4.25, 4)
    assert (float(metrics.accuracy.compute()), int(metrics.accuracy.count[...])) == (0.5, 38)
    for later in (lambda metrics: metrics.compute()["loss"], lambda metrics: metrics.reset()):
        with pytest.raises(replicax.errors.TraceError, match=r"(total|count) is (read|written).*Optimizer or metric"):
            strategy.run(accumulated(functools.partial(step, later=later), 3), args=(metrics, batch))


def test_a_collective_in_each_micro_batch_of_an_uneven_batch_is_told_with_its_line() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        total = replicax.Variable(0.0)

    def step(x: Any) -> None:
        total.assign_add(replicax.get_replica_context().all_reduce("sum", x.sum()))

    [batch] = strategy.distribute_dataset([np.ones(7, np.float32)])
    with pytest.warns(
        replicax.errors.ExecutorWarning, match=r"the scan at .*test_accumulation.py:\d+ .* has a collective"
    ):
        strategy.run(accumulated(step, 2), args=(batch,))


def test_what_each_micro_batch_would_change_in_a_copy_is_told() -> None:
    from flax import nnx

    def step(model: Any, count: Any, x: Any) -> None:
        model.count[...] += 1
        count[...] += 1

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.count = nnx.Variable(jnp.int32(0))

    strategy = strategy_of(2)
    with pytest.raises(TypeError, match=r"args\[1\], of type Variable, was changed in place .*change would be lost"):
        strategy.run(accumulated(step, 2), args=(Model(), nnx.Variable(jnp.int32(0)), jnp.ones(4)))


@pytest.mark.parametrize("kind", ["variable", "nnx"])
def test_a_value_that_differs_between_replicas_is_told_with_its_line(kind: str) -> None:
    from flax import nnx

    strategy = strategy_of(2)
    with strategy.scope():
        seen = replicax.Variable(jnp.zeros(3)) if kind == "variable" else nnx.List([nnx.Variable(jnp.zeros(3))])

    def step(seen: Any, x: Any) -> None:
        if kind == "variable":
            seen.assign_add(x.mean(0))
        else:
            seen[0][...] += x.mean(0)

    [batch] = strategy.distribute_dataset([np.ones((4, 3), np.float32)])
    with pytest.raises(replicax.errors.LocalityError, match=rf"{re.escape(__file__)}:\d+ \(.*step\)"):
        strategy.run(accumulated(step, 2), args=(seen, batch))


def test_a_pipeline_divides_its_batch_itself() -> None:
    strategy = logical_strategy(1, 2)

    def whole(x: Any) -> Any:
        return replicax.compute_average_loss(strategy.assign_to_logical_device(x, 1))

    def in_parts(x: Any) -> Any:
        return sum(
            replicax.compute_average_loss(strategy.assign_to_logical_device(part, 1)) for part in jnp.split(x, 2)
        )

    for step in (whole, in_parts):
        with pytest.raises(replicax.errors.PlacementError, match="assigns values to logical devices .*microbatches"):
            strategy.run(accumulated(step, 2), args=(np.ones(8, np.float32),))


def test_a_number_by_itself_is_called_loss_in_micro_batches_too() -> None:
    strategy = strategy_of(2)
    dataset = strategy.distribute_dataset([np.arange(8, dtype=np.float32)])
    run = replicax.train(lambda x: x.mean(), dataset, 1, accumulate=2, reduce={"loss": "mean"}, progress=False)
    assert run.numbers["loss"] == 3.5
    [batch] = dataset
    found = strategy.run(accumulated(lambda x: x.mean(), 2, mean=["loss"]), args=(batch,))
    assert float(strategy.reduce("mean", found)) == 3.5
