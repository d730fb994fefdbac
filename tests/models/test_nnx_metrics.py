"""Metrics of Flax NNX under strategies: the same numbers as NNX alone has."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import replicax
from replicax.loop import accumulated
from tests.conftest import logical_strategy
from tests.models.nets import arrays, check_alike
from tests.programs.programs import third_party

PADDED = replicax.InputOptions(partial_batch="pad")
ROWS = [(np.eye(4, 3, dtype=np.float32), np.arange(4) % 3), (np.eye(3, 3, dtype=np.float32)[::-1], np.arange(3))]


@third_party
def test_metrics_take_in_all_replicas(pair) -> None:
    values = np.random.default_rng(0).normal(size=8).astype(np.float32)

    def fresh():
        return nnx.MultiMetric(spread=nnx.metrics.Welford("x"), mean=nnx.metrics.Average("x"))

    metrics, expected = fresh(), fresh()
    for batch in pair.distribute_dataset([values, 2 * values]):
        pair.run(lambda metrics, x: metrics.update(x=x), args=(metrics, batch))
    for batch in (values, 2 * values):
        nnx.jit(lambda metrics, x: metrics.update(x=x))(expected, batch)
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
    for batch in pair.distribute_dataset(data, PADDED):
        pair.run(update, args=(*metrics, batch))
    for batch in data:
        nnx.jit(update)(*expected, batch)
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


class Top2(nnx.metrics.Average):
    def update(self, logits, *, labels, **_):
        super().update(values=(jax.lax.top_k(logits, 2)[1] == labels[:, None]).any(-1))


class Confusion(nnx.Metric):
    def __init__(self):
        self.tables = nnx.Dict(counts=nnx.metrics.MetricState(jnp.zeros((3, 3))))
        self.top, self.updates = Top2(), nnx.metrics.MetricState(jnp.array(0))

    def update(self, logits, labels):
        self.tables.counts[...] = self.tables.counts[...].at[labels, logits.argmax(-1)].add(1)
        self.top.update(logits, labels=labels)
        self.updates[...] += 1


@third_party
def test_metrics_of_your_own_take_the_arguments_that_they_declare(pair) -> None:
    def update(top, confusion, logits, labels):
        top.update(logits, labels=labels, loss=logits)
        if confusion is not None:
            confusion.update(logits, labels)

    metrics, expected, padded = (Top2(), Confusion()), (Top2(), Confusion()), Top2()
    for batch in pair.distribute_dataset(ROWS):
        pair.run(update, args=(*metrics, *batch))
    for batch in pair.distribute_dataset(ROWS, PADDED):
        pair.run(update, args=(padded, None, *batch))
    for batch in ROWS:
        nnx.jit(update)(*expected, *batch)
    check_alike(arrays(*metrics), arrays(*expected))
    check_alike(arrays(padded), arrays(expected[0]))


@third_party
def test_one_replica_leaves_padding_out_too() -> None:
    strategy, metric = replicax.OneDeviceStrategy("cpu:0"), nnx.metrics.Average()
    for batch in strategy.distribute_dataset([np.arange(4.0), np.arange(3.0)], PADDED):
        strategy.run(lambda metric, x: metric.update(values=x), args=(metric, batch))
    assert (int(metric.total[...]), int(metric.count[...])) == (9, 7)


@third_party
def test_an_average_that_adds_up_by_itself_refuses_padding(pair) -> None:
    class Total(nnx.metrics.Average):
        def update(self, *, values):
            self.total[...] += values.sum()

    metric = Total()
    for batch in pair.distribute_dataset([np.arange(4.0)]):
        pair.run(lambda metric, x: metric.update(values=x), args=(metric, batch))
    assert float(metric.total[...]) == 6
    [_, batch] = pair.distribute_dataset([np.arange(4.0), np.arange(3.0)], PADDED)
    with pytest.raises(ValueError, match=r"Total.update: the batch is padded.*call super\(\).update"):
        pair.run(lambda metric, x: metric.update(values=x), args=(metric, batch))


@third_party
def test_only_metrics_that_are_sums_leave_padding_out(pair) -> None:
    def update(confusion, logits, labels):
        confusion.update(logits, labels)

    sums = r"and only metrics that are sums \(.*use one of these, or"
    [_, padded] = pair.distribute_dataset(ROWS, PADDED)
    with pytest.raises(ValueError, match=f"Confusion.update: the batch is padded, {sums} drop_remainder"):
        pair.run(update, args=(Confusion(), *padded))
    with pytest.raises(ValueError, match=r"Average.update: .* padded to 2 rows, so there must be an entry for each"):
        pair.run(lambda metric, x, y: metric.update(values=x.sum(0)), args=(nnx.metrics.Average(), *padded))
    [_, uneven] = pair.distribute_dataset(ROWS)
    with pytest.raises(ValueError, match=f"a micro-batch of .* may be padded, {sums} update it in another step"):
        pair.run(accumulated(update, 2), args=(Confusion(), *uneven))
