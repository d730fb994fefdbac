"""Means over each replica's own examples are not averaged over replicas that have other numbers of them, unwarned."""

from __future__ import annotations

import linecache
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax


def batch_of(pair: replicax.MirroredStrategy, count: int, columns: int = 3) -> Any:
    rows = np.arange(count * columns, dtype=np.float32).reshape(count, columns) / 10
    return next(iter(pair.distribute_dataset([rows])))


def average(value: Any) -> Any:
    return replicax.get_replica_context().all_reduce("mean", value)


def total(value: Any) -> Any:
    return replicax.get_replica_context().all_reduce("sum", value)


def count_of(x: Any) -> Any:
    return jnp.float32(x.size)


def large(x: Any) -> Any:
    return (x > 0.1).astype(x.dtype)


AVERAGED: dict[str, Any] = {
    "mean": lambda x: average(jnp.mean(x)),  # wrong
    "by hand": lambda x: average(jnp.sum(x) / max(1, x.size)),  # wrong
    "pmean": lambda x: jax.lax.pmean(x.mean(), "replica"),  # wrong
    "sum by the number": lambda x: total(x.mean()) / replicax.get_replica_context().num_replicas_in_sync,  # wrong
    "in a loop": lambda x: jax.lax.fori_loop(0, 2, lambda i, c: c + average(jnp.mean(x)), 0.0),  # wrong
    "masked": lambda x: average(jnp.sum(x * large(x)) / jnp.sum(large(x))),  # wrong
}
WEIGHTED: dict[str, Any] = {
    "shares": lambda x: total(replicax.compute_average_loss(x.mean(-1))),
    "sums and numbers": lambda x: total(x.sum()) / total(count_of(x)),
    "means of sums and numbers": lambda x: average(x.sum()) / average(count_of(x)),
    "means by their numbers": lambda x: average(x.mean() * x.size) / average(count_of(x)),
    "declared": lambda x: average(replicax.as_share(x.mean())),
    "largest": lambda x: average(x.max(initial=0.0)),
    "a sum of means": lambda x: total(x.mean()),
}


def warned(pair: replicax.MirroredStrategy, step: Any, count: int) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(2):
            pair.run(step, args=(batch_of(pair, count),))
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("count", [1, 7, 8])
@pytest.mark.parametrize("step", AVERAGED.values(), ids=AVERAGED)
def test_a_mean_of_means_that_is_no_gradient(pair: replicax.MirroredStrategy, step: Any, count: int) -> None:
    found = [w for w in warned(pair, step, count) if w.category is replicax.errors.ShareWarning]
    if count == 8:
        assert found == []
        return
    [warning] = found
    assert "# wrong" in linecache.getline(warning.filename, warning.lineno)
    for part in ("NaN if a replica has none", "compute_average_loss(values)", "replicax.Mean"):
        assert part in str(warning.message)


def test_a_mean_whose_gradient_is_averaged_is_told_once(pair: replicax.MirroredStrategy) -> None:
    with pair.scope():
        w = replicax.Variable(2.0)

    def step(x: Any) -> Any:
        loss, gradient = replicax.value_and_grad(lambda: jnp.mean(x * w.value), w)()
        w.assign_sub(0.1 * average(gradient))
        return average(loss)

    [warning] = warned(pair, step, 7)
    assert "Its gradient is averaged over the 2 replicas" in str(warning.message)


@pytest.mark.parametrize("columns", [1, 2, 4])
def test_as_many_columns_as_replicas_are_no_count_of_these(pair: replicax.MirroredStrategy, columns: int) -> None:
    with pytest.raises(replicax.errors.ShareWarning, match="the mean of the 2 replicas' means"):
        pair.run(AVERAGED["mean"], args=(batch_of(pair, 3, columns),))
    pair.run(lambda x: total(x.sum() / (3 * columns)), args=(batch_of(pair, 3, columns),))


def averaged(ctx: Any, x: Any) -> None:
    ctx.set_last_step_output("mean", x.mean(), "mean")


def test_many_steps_and_the_training_loop(pair: replicax.MirroredStrategy) -> None:
    dataset = pair.distribute_dataset([np.ones((4, 3), np.float32), np.ones((3, 3), np.float32)])
    with pytest.raises(replicax.errors.ShareWarning, match="'averaged'.*the mean of the 2 replicas' means"):
        pair.run_steps(averaged, iter(dataset), steps=2)
    with pytest.raises(replicax.errors.ShareWarning, match="different numbers here"):
        replicax.train(lambda x: x.mean(), dataset, 2, reduce="mean", strategy=pair, progress=False)


@pytest.mark.covering(1)
@pytest.mark.parametrize("count", [7, 8])
@pytest.mark.parametrize("step", WEIGHTED.values(), ids=WEIGHTED)
def test_means_that_are_weighted_or_meant(pair: replicax.MirroredStrategy, step: Any, count: int) -> None:
    assert warned(pair, step, count) == []


@pytest.mark.parametrize("count", [1, 7])
def test_the_cure_of_a_mean_of_means(pair: replicax.MirroredStrategy, count: int) -> None:
    batch = batch_of(pair, count)
    expected = np.arange(count * 3).mean() / 10
    np.testing.assert_allclose(pair.run(WEIGHTED["shares"], args=(batch,)), expected, rtol=1e-6)
    shares = pair.run(lambda x: replicax.compute_average_loss(x.mean(-1)), args=(batch,))
    np.testing.assert_allclose(pair.reduce("sum", shares), expected, rtol=1e-6)
    with pair.scope():
        mean = replicax.Mean()
    pair.run(lambda x: mean.update(x), args=(batch,))
    np.testing.assert_allclose(mean.result(), expected, rtol=1e-6)


@pytest.mark.parametrize("count", [1, 7])
def test_a_mean_of_means_that_are_returned(pair: replicax.MirroredStrategy, count: int) -> None:
    batch = batch_of(pair, count)
    means = pair.run(lambda x: x.mean(), args=(batch,))
    with pytest.raises(
        replicax.errors.ShareWarning, match=r"(?s)reduce\('mean', …\).*NaN if.*compute_average_loss.*\.Mean"
    ):
        pair.reduce("mean", means)


EQUAL: dict[str, Any] = {
    "cut": lambda x, z: average(jnp.mean(x[:3])),
    "cut from the end": lambda x, z: average(jnp.mean(x[-3:].mean(-1))),
    "cut and masked": lambda x, z: average(jnp.sum(x[:3] * large(x[:3])) / jnp.sum(large(x[:3]))),
    "another argument": lambda x, z: average(jnp.mean(z)),
    "a gradient": lambda x, z: average(jax.grad(lambda w: jnp.mean(x[:3] * w))(2.0)),
}


@pytest.mark.parametrize("step", EQUAL.values(), ids=EQUAL)
def test_means_over_equal_numbers(pair: replicax.MirroredStrategy, step: Any) -> None:
    others = pair.distribute_values_from_function(lambda ctx: np.ones((3, 2), np.float32))
    with pair.scope():
        w = replicax.Variable(0.0)
    pair.run(lambda x, z: w.assign(step(x, z)), args=(batch_of(pair, 7), others))
    assert np.isfinite(w.numpy())


def test_the_scale_of_means_over_equal_numbers(pair: replicax.MirroredStrategy) -> None:
    batch, others = batch_of(pair, 7), pair.distribute_values_from_function(lambda ctx: np.ones((3, 2), np.float32))
    cut, of_others = pair.run(lambda x, z: (x[:3].mean(), z.mean()), args=(batch, others))
    assert [cut.scale, of_others.scale] == ["mean", "mean"]
    assert pair.reduce("mean", of_others) == 1


@pytest.mark.parametrize("cut", [slice(4), slice(1, None)], ids=["longer", "without the first"])
def test_a_cut_that_leaves_different_numbers(pair: replicax.MirroredStrategy, cut: slice) -> None:
    with pytest.raises(replicax.errors.ShareWarning, match="different numbers here"):
        pair.run(lambda x: average(x[cut].mean()), args=(batch_of(pair, 7),))
