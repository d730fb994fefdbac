"""Metrics of Flax NNX under strategies: the same numbers as NNX alone has."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import replicax
from tests.conftest import logical_strategy
from tests.models.nets import arrays, check_alike
from tests.programs.programs import third_party


@third_party
def test_metrics_take_in_all_replicas(pair) -> None:
    values = np.random.default_rng(0).normal(size=8).astype(np.float32)

    def fresh():
        return nnx.MultiMetric(spread=nnx.metrics.Welford("x"), mean=nnx.metrics.Average("x"))

    metrics, expected = fresh(), fresh()
    for batch in pair.distribute_dataset([values, 2 * values]):
        pair.run(lambda metrics, x: metrics.update(x=x), args=(metrics, batch))
    for batch in (values, 2 * values):
        expected.update(x=batch)
    for a, b in zip(jax.tree.leaves(metrics.compute()), jax.tree.leaves(expected.compute()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert int(metrics.mean.count[...]) == 16
    metrics.reset()
    pair.run(lambda metrics: metrics.update(x=2.0), args=(metrics,))
    assert float(metrics.mean.compute()) == 2


@third_party
def test_a_mask_of_your_own_and_the_padding_are_both_left_out(pair) -> None:
    def rows(count):
        values = np.arange(12, dtype=np.float32).reshape(4, 3)[:count]
        return {"loss": values, "logits": values, "labels": np.arange(count) % 3, "own": np.arange(count) % 2 == 0}

    def update(average, accuracy, batch):
        average.update(loss=batch["loss"], mask=jnp.broadcast_to(batch["own"][:, None], batch["loss"].shape))
        accuracy.update(logits=batch["logits"], labels=batch["labels"], mask=batch["own"])

    metrics, expected = [(nnx.metrics.Average("loss"), nnx.metrics.Accuracy()) for _ in range(2)]
    data = [rows(4), rows(3)]
    for batch in pair.distribute_dataset(data, replicax.InputOptions(partial_batch="pad")):
        pair.run(update, args=(*metrics, batch))
    for batch in data:
        update(*expected, jax.tree.map(jnp.asarray, batch))
    check_alike(arrays(*metrics), arrays(*expected))


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.soak)])
@third_party
def test_metrics_may_get_values_from_any_stage_of_a_pipeline(replicas) -> None:
    strategy, metric = logical_strategy(replicas, 2), nnx.metrics.Average("x")
    [batch] = strategy.distribute_dataset([np.arange(8, dtype=np.float32)])
    for _ in range(2):
        strategy.run(lambda metric, x: metric.update(x=strategy.assign_to_logical_device(x, 1)), args=(metric, batch))
        assert float(metric.compute()) == 3.5
    assert int(metric.count[...]) == 16
