"""Padded batches, on every strategy and executor: what comes out is that of the examples alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax.variables.partitioners import over_all
from tests.conftest import shared_strategy, strategy_of
from tests.padding.padded_batches import padded_batch, sizes_of
from tests.soaking import soak_except, soaked

PER_REPLICA = replicax.RunOptions(executor="per_replica")
GLOBAL = 8
rng = np.random.default_rng(0)
X = rng.normal(size=(GLOBAL, 3)).astype(np.float32)
Y = rng.integers(0, 4, GLOBAL)
W = rng.normal(size=(3, 4)).astype(np.float32)


def devices(n: int) -> list[str]:
    return [f"cpu:{i}" for i in range(n)]


STRATEGIES = {
    "default": lambda: replicax.DefaultStrategy(),
    "one device": lambda: replicax.OneDeviceStrategy("cpu:1"),
    "mirrored 2": lambda: strategy_of(2),
    "mirrored 4": lambda: strategy_of(4),
    "shared 4": lambda: shared_strategy(4, 2),
    "sharded 4": lambda: replicax.ShardedStrategy(devices(4), over_all(4, min_bytes=0)),
    "groups 4": lambda: replicax.ShardedStrategy(
        devices(4), replicax.variables.GroupPartitioner(2, over_all(2, min_bytes=0))
    ),
    "central 2": lambda: replicax.CentralStorageStrategy(devices(2), "cpu:2"),
}


def losses_and_gradient(w: Any, size: int) -> tuple[Any, Any]:
    """Of the first examples: the loss of each, and the gradient of their mean."""
    x, y = X[:size].astype(np.float64), Y[:size]
    scores = np.exp(x @ w)
    chances = scores / scores.sum(1, keepdims=True)
    return -np.log(chances[np.arange(size), y]), x.T @ (chances - np.eye(4)[y]) / size


class Training:
    """A model, its step, and the same in plain JAX on the examples alone."""

    def __init__(self, strategy: replicax.Strategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.w = replicax.Variable(W, name="w", aggregation="sum")
            self.optimizer = replicax.Optimizer(optax.sgd(0.5))
            self.mean = replicax.Mean("loss")
            self.accuracy = replicax.Accuracy()
        self.plain = W.astype(np.float64)

    def step(self, b: Any) -> Any:
        context = replicax.get_replica_context()

        def loss() -> Any:
            logits = jnp.nan_to_num(b["x"]) @ self.w.read_value()
            losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), b["y"][:, None], axis=1)[:, 0]
            return replicax.compute_average_loss(losses), (losses, logits)

        (share, (losses, logits)), grads = replicax.value_and_grad(loss, [self.w], has_aux=True)()
        self.mean.update(losses)
        self.accuracy.update(b["y"], logits)
        inside = context.merge_call(
            lambda s, v: (s.reduce("mean", v, axis=0), s.reduce("sum", v, axis=0)), args=(losses,)
        )
        self.optimizer.apply_gradients(zip(grads, [self.w], strict=True))
        return share, losses, grads[0], inside

    def check(self, size: int, options: replicax.RunOptions | None) -> None:
        strategy, n = self.strategy, self.strategy.num_replicas_in_sync
        element = padded_batch(strategy, {"x": X[:size], "y": Y[:size]}, GLOBAL // n)
        share, losses, gradient, (mean, total) = strategy.run(self.step, args=(element,), options=options)
        expected, wanted = losses_and_gradient(self.plain, size)
        close(strategy.reduce("sum", share), expected.mean())
        close(strategy.reduce("sum", gradient), wanted)
        close(strategy.reduce("mean", losses, axis=0), expected.mean())
        close(strategy.reduce("sum", losses, axis=0), expected.sum())
        close(strategy.gather(losses, axis=0), expected)
        close(mean, expected.mean())
        close(total, expected.sum())
        found = [len(v) for v in strategy.local_results(losses)]
        assert found == list(sizes_of(size, GLOBAL // n, n))
        self.plain = self.plain - 0.5 * wanted
        close(self.w.read_value(), self.plain)


def close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", soak_except(STRATEGIES, "shared 4", "groups 4"))
def test_an_epoch_is_one_program_and_means_that_of_the_examples(name) -> None:
    training = Training(STRATEGIES[name]())
    seen, right = [], []
    every_size = range(GLOBAL, 0, -1) if name == "shared 4" else (GLOBAL, 6, 1)
    for size in every_size:
        seen.append(losses_and_gradient(training.plain, size)[0])
        right.append(np.argmax(X[:size] @ training.plain, -1) == Y[:size])
        training.check(size, None)
    assert training.strategy.extended.trace_count(training.step) == 1
    close(training.mean.result(), np.concatenate(seen).mean())
    close(training.accuracy.result(), np.concatenate(right).mean())


@pytest.mark.parametrize("replicas", soak_except([1, 2], 2))
def test_the_per_replica_executor_means_the_same(replicas) -> None:
    Training(strategy_of(replicas)).check(5, PER_REPLICA)


def test_counting_the_examples_costs_no_collective(pair) -> None:
    batch = padded_batch(pair, X[:5], 4)
    program = pair.extended.trace(lambda x: replicax.compute_average_loss(x, reduce_dims="sum"), args=(batch,))
    assert program.collectives() == []
    program = pair.extended.trace(
        lambda x: replicax.get_replica_context().merge_call(lambda s, v: s.reduce("mean", v, axis=0), args=(x,)),
        args=(batch,),
    )
    assert [c.kind for c in program.collectives()] == ["all-reduce"]


@pytest.mark.parametrize("options", [None, PER_REPLICA], ids=["compiled", "per_replica"])
def test_results_are_padded_arguments_of_the_next_step(pair, options) -> None:
    losses = pair.run(lambda x: x.sum(1), args=(padded_batch(pair, X[:5], 4),), options=options)
    share = pair.run(replicax.compute_average_loss, args=(losses,), options=options)
    close(pair.reduce("sum", share), X[:5].sum(1).mean())


@pytest.mark.parametrize("options", [None, PER_REPLICA], ids=["compiled", "per_replica"])
def test_the_mask_is_there_for_the_step(pair, options) -> None:
    def step(x: Any) -> Any:
        context = replicax.get_replica_context()
        return context.all_gather(context.example_mask, 0), context.example_mask.sum()

    everywhere, own = pair.run(step, args=(padded_batch(pair, X[:5], 4),), options=options)
    assert everywhere.tolist() == [True] * 5 + [False] * 3
    assert [int(n) for n in pair.local_results(own)] == [4, 1]
    assert pair.run(lambda x: replicax.get_replica_context().example_mask is None, args=(1.0,), options=options)


@pytest.mark.parametrize("options", [None, PER_REPLICA], ids=["compiled", "per_replica"])
def test_values_of_two_batches_are_refused_in_one_step(pair, options) -> None:
    first, second = padded_batch(pair, X[:5], 4), padded_batch(pair, X[:6], 4)
    with pytest.raises(ValueError, match=r"args\[1\] comes from another padded batch .* \[4, 1\] .* \[4, 2\].*'exact'"):
        pair.run(lambda a, b: a + b, args=(first, second), options=options)
    means = pair.reduce("mean", [first, second], axis=0)  # which each has its own count
    close(means[0], X[:5].mean(0))
    close(means[1], X[:6].mean(0))
    # Examples of which it is not known where they are can't be mistaken for those of another batch.
    mixed = pair.run(lambda x: jnp.sort(x, axis=0), args=(second,), options=options)
    for fn, args in ((lambda a, b: a + b.sum(), (first, mixed)), (lambda a, b: a.sum() + b, (mixed, first))):
        assert pair.run(fn, args=args, options=options).mask.same_as(first.mask)


@pytest.mark.parametrize("options", [None, PER_REPLICA], ids=["compiled", "per_replica"])
def test_a_value_of_which_it_can_not_be_told(pair, options) -> None:
    batch = padded_batch(pair, X[:5], 4)
    mixed = pair.run(lambda x: jnp.sort(jnp.nan_to_num(x), axis=0), args=(batch,), options=options)
    for refused in (
        lambda: pair.reduce("mean", mixed, axis=0),
        lambda: pair.gather(mixed, axis=0),
        lambda: pair.run(
            lambda x: replicax.get_replica_context().merge_call(
                lambda s, v: s.reduce("sum", v, axis=0), args=(jnp.sort(x, axis=0),)
            ),
            args=(batch,),
            options=options,
        ),
    ):
        with pytest.raises(ValueError, match=r"along dim 0 of a value of shape \(4, 3\) .*can't be told.*example_mask"):
            refused()
    assert len(pair.local_results(mixed)) == 2
    assert pair.reduce("sum", mixed).shape == (4, 3)


@pytest.mark.parametrize("options", [None, PER_REPLICA], ids=["compiled", "per_replica"])
def test_examples_side_by_side_are_combined_if_each_replica_has_as_many(pair, options) -> None:
    parts = pair.distribute_dataset([X[:, :2], X[:6, :2], X[:5, :2]], replicax.InputOptions(partial_batch="pad"))
    _, even, uneven = (pair.run(lambda x: (x, x.T), args=(batch,), options=options) for batch in parts)
    for value, turned in zip(even, (np.asarray, np.transpose), strict=True):
        wanted = [turned(X[:3, :2]), turned(X[3:6, :2])]
        close(pair.reduce("sum", value), sum(wanted))
        for axis in (0, 1, -1):
            close(pair.gather(value, axis), np.concatenate(wanted, axis))
            close(pair.reduce("mean", value, axis), np.stack(wanted).mean((0, axis % 2 + 1)))
    for combine in (
        lambda: pair.gather(uneven[0], 1),
        lambda: pair.gather(uneven[1], -2),
        lambda: pair.reduce("sum", uneven),
        lambda: pair.reduce("mean", uneven[0], 1),
    ):
        with pytest.raises(ValueError, match=r"shapes \[\((3, 2|2, 3)\), \(2, 2\)\]"):
            combine()
    alone = strategy_of(1)
    values = alone.run(lambda x: (x, x.max(0)), args=(padded_batch(alone, X[:3], 4),), options=options)
    close(alone.gather(values, 0)[0], X[:3])


@pytest.mark.parametrize("options", [None, PER_REPLICA], ids=["compiled", "per_replica"])
def test_a_merge_fn_can_not_gather_what_has_padding(pair, options) -> None:
    def step(x: Any) -> Any:
        return replicax.get_replica_context().merge_call(lambda s, v: s.gather(v, axis=0), args=(x,))

    with pytest.raises(ValueError, match="gather in a merge_fn: some rows of the value may be padding"):
        pair.run(step, args=(padded_batch(pair, X[:5], 4),), options=options)


@pytest.mark.parametrize("options", [None, PER_REPLICA], ids=["compiled", "per_replica"])
def test_what_is_no_example_is_reduced_as_it_is(pair, options) -> None:
    def step(b: Any) -> Any:
        counts = (
            jax.nn.one_hot(b["y"], 4) * replicax.get_replica_context().example_mask[:, None].astype(jnp.float32)
        ).sum(0)
        return counts, replicax.get_replica_context().merge_call(
            lambda s, v: s.reduce("sum", v, axis=0), args=(counts,)
        )

    # As many classes as rows.
    counts, total = pair.run(step, args=(padded_batch(pair, {"y": Y[:5]}, 4),), options=options)
    assert counts.mask is None
    assert float(pair.reduce("sum", counts, axis=0)) == float(total) == 5


@pytest.mark.parametrize("options", [None, PER_REPLICA], ids=["compiled", "per_replica"])
def test_a_mean_along_several_dims_counts_the_numbers_of_the_examples(pair, options) -> None:
    batch = padded_batch(pair, X[:5], 4)
    inside = pair.run(
        lambda x: replicax.get_replica_context().merge_call(lambda s, v: s.reduce("mean", v, axis=(0, 1)), args=(x,)),
        args=(batch,),
        options=options,
    )
    for found in (inside, pair.reduce("mean", batch, axis=(0, 1))):
        close(found, X[:5].mean())
    by_columns = pair.run(jax.vmap(replicax.compute_average_loss, 1), args=(batch,), options=options)
    close(pair.reduce("sum", by_columns), X[:5].mean(0))


@pytest.mark.parametrize("options", [None, PER_REPLICA], ids=["compiled", "per_replica"])
def test_losses_and_metrics_need_an_entry_for_each_row(pair, options) -> None:
    batch = padded_batch(pair, X[:5], 4)
    with pair.scope():
        mean = replicax.Mean()
    with pytest.raises(ValueError, match=r"padded to 4 rows, .* got shape \(12,\)"):
        pair.run(lambda x: replicax.compute_average_loss(x.reshape(-1)), args=(batch,), options=options)
    with pytest.raises(ValueError, match=r"padded to 4 rows, .* got shape \(12,\)"):
        pair.run(lambda x: mean.update(x.reshape(-1)), args=(batch,), options=options)


MOVED = {
    "sorted": lambda x: jnp.sort(x)[::-1],
    "flipped": jnp.flip,
    "shuffled": lambda x: jnp.tanh(x[jax.random.permutation(jax.random.key(0), 4)]),
    "looked up in the order of a sort": lambda x: x[jnp.argsort(x)],
}
IN_THEIR_ROWS = {
    "mixed with others": lambda x: 0.75 * x + 0.25 * x[::-1],
    "sorted and put back": lambda x: x[jnp.argsort(x)][jnp.argsort(jnp.argsort(x))],
    "ranks": lambda x: jnp.argsort(jnp.argsort(x)),
    "joined and parted": lambda x: jnp.split(jnp.concatenate([x, x]), 2)[0],
    "computed in two halves": lambda x: jnp.concatenate([jnp.sin(x[:2]), x[2:]]),
    "of all pairs": lambda x: jnp.diag(x[:, None] * x[None]),
}


@pytest.mark.parametrize("options", [None, PER_REPLICA], ids=["compiled", "per_replica"])
def test_losses_and_metrics_refuse_rows_that_have_moved_for_sure(pair, options) -> None:
    batch = padded_batch(pair, X[:5, 0], 4)
    with pair.scope():
        mean = replicax.Mean()
    for moved in MOVED.values():
        for use in (replicax.compute_average_loss, mean.update):
            with pytest.raises(ValueError, match=r"padded to 4 rows, in their order, got rows in another order"):
                pair.run(lambda x, use=use, moved=moved: use(moved(x)), args=(batch,), options=options)
    assert float(mean.result()) == 0

    def each(x: Any) -> Any:
        context, x = replicax.get_replica_context(), jnp.nan_to_num(x)
        values = {name: fn(x).astype(jnp.float32) for name, fn in IN_THEIR_ROWS.items()}
        own = {name: jnp.where(context.example_mask, v, 0).sum() / 5 for name, v in values.items()}
        return {name: replicax.compute_average_loss(v) for name, v in values.items()}, own

    shares, own = (pair.reduce("sum", found) for found in pair.run(each, args=(batch,), options=options))
    for name, share in shares.items():
        close(share, own[name])


@pytest.mark.parametrize("options", [None, PER_REPLICA], ids=["compiled", "per_replica"])
def test_rows_that_are_not_those_of_the_batch_are_not_taken_for_no_examples(pair, options) -> None:
    def step(x: Any, matrix: Any) -> Any:
        features = jnp.median(jnp.nan_to_num(x), axis=0)
        sums = matrix @ jnp.nan_to_num(x)  # running sums, by a matrix of each replica
        return [
            x[:3, 0],
            jnp.tanh(jnp.sort(x, axis=0)[:3]),
            jnp.diff(x, axis=0),
            jnp.append(x[:, 0], 1.0),
            sums,
        ], features

    matrix = pair.distribute_values_from_function(lambda _: np.tri(4, dtype=np.float32))
    refused, features = pair.run(step, args=(padded_batch(pair, X[:5], 4), matrix), options=options)
    for value in refused:
        for combine in (lambda v: pair.reduce("sum", v, axis=0), lambda v: pair.gather(v, axis=0)):
            with pytest.raises(ValueError, match=r"along dim 0 of a value of shape .*can't be told"):
                combine(value)
    assert pair.gather(features, axis=0).shape == (6,)


@pytest.mark.parametrize("options", [None, PER_REPLICA], ids=["compiled", "per_replica"])
def test_a_given_size_divides_and_infinite_padding_is_nothing(pair, options) -> None:
    batch = padded_batch(pair, X[:5], 4)

    shares = pair.run(
        lambda x: replicax.compute_average_loss(
            jnp.where(jnp.isnan(x), jnp.inf, 1.0), global_batch_size=10, reduce_dims="sum"
        ),
        args=(batch,),
        options=options,
    )
    close(pair.reduce("sum", shares), 5 * 3 / 10)


@pytest.mark.parametrize("options", [None, PER_REPLICA], ids=["compiled", "per_replica"])
def test_a_metric_of_padding_that_is_infinite_is_that_of_the_examples(pair, options) -> None:
    batch = padded_batch(pair, X[:5], 4)
    with pair.scope():
        mean = replicax.Mean()
    pair.run(lambda x: mean.update(jnp.where(jnp.isnan(x), jnp.inf, x).max(1)), args=(batch,), options=options)
    close(mean.result(), X[:5].max(1).mean())


@pytest.mark.parametrize("sizes", [(2, 1), (1, 0), soaked((3, 3)), soaked((0, 0))])
def test_replicas_of_other_sizes_without_padding(pair, sizes) -> None:
    with pair.scope():
        mean, w = replicax.Mean(), replicax.Variable(2.0, name="w")
    starts = [0, sizes[0]]
    value = pair.distribute_values_from_function(
        lambda c: X[:, 0][starts[c.replica_id_in_sync_group] :][: sizes[c.replica_id_in_sync_group]]
    )
    everything = X[: sum(sizes), 0]
    expected = everything.mean() if len(everything) else 0.0
    close(pair.reduce("sum", value, axis=0), everything.sum())
    close(pair.reduce("mean", value, axis=0), expected)

    def step(x: Any) -> Any:
        mean.update(x)
        share, grads = replicax.value_and_grad(lambda: replicax.compute_average_loss(x * w.read_value()), [w])()
        reduced = replicax.get_replica_context().merge_call(lambda s, v: s.reduce("mean", v, axis=0), args=(x,))
        return share, grads[0], reduced

    share, gradient, inside = pair.run(step, args=(value,), options=PER_REPLICA)
    close(pair.reduce("sum", share), 2 * expected)
    close(pair.reduce("sum", gradient), expected)
    close(inside, expected)
    close(mean.result(), expected)


def test_padding_next_to_sizes_that_differ_is_no_one_program(pair) -> None:
    sizes = pair.distribute_values_from_function(lambda c: np.ones(1 + c.replica_id_in_sync_group, np.float32))
    args = padded_batch(pair, X[:5], 4), sizes
    with pytest.warns(replicax.errors.ExecutorWarning, match=r"some arguments are padded and others differ in size"):
        total = pair.run(lambda x, y: jnp.nan_to_num(x).sum() + y.sum(), args=args)
    close(pair.reduce("sum", total), X[:5].sum() + 3)


def test_call_for_each_replica_and_components_know_their_value(pair) -> None:
    losses = pair.extended.call_for_each_replica(lambda x: x.sum(1), args=(padded_batch(pair, X[:5], 4),))
    parts = pair.local_results(losses)
    assert pair.extended.value_container(parts[1]) is losses
    assert repr(losses).startswith("PerReplica(float32[4], 2 replicas, 5 of 8 rows are examples: [")


@pytest.mark.parametrize("options", [None, PER_REPLICA], ids=["compiled", "per_replica"])
def test_components_are_without_padding_along_whichever_dim_it_lies(pair, options) -> None:
    turned = pair.run(lambda x: x.T, args=(padded_batch(pair, X[:5], 4),), options=options)
    assert turned.dim == 1
    parts = pair.local_results(turned)
    assert [v.shape for v in parts] == [(3, 4), (3, 1)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), X[:5].T)
