"""Models of other libraries, and metrics, on parameter servers."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

import replicax
from tests.parameter_server.thread_actors import coordinator_of

WAIT = 100.0


def nnx_loss(strategy: replicax.Strategy) -> tuple[Any, Callable[..., Any]]:
    """Parameters, and a loss of them: a model as NNX's functional interface has it, with batch statistics."""
    nnx = pytest.importorskip("flax.nnx")
    with strategy.scope():
        model = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(1)))
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        params, rest = replicax.as_variables((params, rest))

    def loss(params: Any, x: Any) -> Any:
        model = nnx.merge(graphdef, params, replicax.as_arrays(rest))
        y = model(x)
        replicax.assign(rest, nnx.state(model, nnx.BatchStat))
        return replicax.compute_average_loss((y**2 + y).sum(-1))

    return params, loss


def equinox_loss(strategy: replicax.Strategy) -> tuple[Any, Callable[..., Any]]:
    """The same of a module of Equinox."""
    eqx = pytest.importorskip("equinox")
    with strategy.scope():
        params = replicax.as_variables(eqx.nn.Linear(3, 4, key=jax.random.key(0)))
    return params, lambda model, x: replicax.compute_average_loss((jax.vmap(model)(x) ** 2).sum(-1))


@pytest.mark.parametrize("make", [nnx_loss, equinox_loss])
def test_a_model_learns_as_under_one_device(make: Callable[[replicax.Strategy], Any]) -> None:
    def model_of(strategy: replicax.Strategy) -> tuple[Any, Callable[..., Any]]:
        params, loss = make(strategy)
        with strategy.scope():
            optimizer = replicax.Optimizer(optax.sgd(0.1, momentum=0.9))

        def step(x: Any) -> Any:
            share, gradients = replicax.value_and_grad(loss, params)(params, x)
            optimizer.apply_gradients(gradients, params)
            return share

        return params, step

    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    one = replicax.OneDeviceStrategy("cpu:0")
    expected, step = model_of(one)
    shares = [one.run(step, args=(x,)) for _ in range(3)]
    served = replicax.ParameterServerStrategy(num_servers=2, max_staleness=0)
    params, served_step = model_of(served)
    with coordinator_of(served) as (coordinator, _):
        results = [coordinator.schedule(lambda x: served.run(served_step, args=(x,)), args=(x,)) for _ in range(3)]
        np.testing.assert_allclose(coordinator.fetch(results), shares, rtol=1e-6)
    found, wanted = (jax.tree.leaves(replicax.as_arrays(tree)) for tree in (params, expected))
    for mine, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6)


def test_an_object_that_keeps_what_steps_change_is_refused() -> None:
    nnx = pytest.importorskip("flax.nnx")
    strategy = replicax.ParameterServerStrategy(num_workers=1)
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with coordinator_of(strategy) as (coordinator, _):
        coordinator.schedule(
            lambda x: strategy.run(lambda model, x: model(x), args=(model, x)), args=(np.ones((1, 2)),)
        )
        with pytest.raises(replicax.errors.WorkerError, match=r"an argument is a Linear, .*as_variables.*nnx\.split"):
            coordinator.join(WAIT)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_metrics_add_up_what_all_workers_have(mode: Any, tmp_path: pathlib.Path) -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=2, devices_per_worker=2, mode=mode)
    with strategy.scope():
        mean, accuracy = replicax.Mean("loss"), replicax.Accuracy()
    labels = np.random.default_rng(0).integers(0, 2, size=(4, 2, 3))  # functions, replicas, examples
    scores = np.random.default_rng(1).random(size=labels.shape).astype(np.float32)

    def step(labels: Any, scores: Any) -> None:
        mean.update(scores)
        accuracy.update(labels, scores)

    def update(labels: Any, scores: Any) -> None:  # on a worker
        mine = [
            strategy.distribute_values_from_function(lambda ctx, x=x: x[ctx.replica_id_in_sync_group])
            for x in (labels, scores)
        ]
        strategy.run(step, args=mine)

    with coordinator_of(strategy) as (coordinator, _):
        for parts in zip(labels, scores, strict=True):
            coordinator.schedule(update, args=parts)
        coordinator.join(WAIT)
        np.testing.assert_allclose(mean.result(), scores.mean(), rtol=1e-6)
        np.testing.assert_allclose(accuracy.result(), (labels == (scores > 0.5)).mean(), rtol=1e-6)
        replicax.Checkpoint(mean=mean.variables).save(tmp_path / "metric")
        mean.reset()
        assert mean.result() == 0
    pair = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    with pair.scope():
        elsewhere = replicax.Mean("loss")
    replicax.Checkpoint(mean=elsewhere.variables).restore(tmp_path / "metric")
    np.testing.assert_allclose(elsewhere.result(), scores.mean(), rtol=1e-6)
