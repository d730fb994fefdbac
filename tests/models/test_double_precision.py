"""In float64, training on four replicas is that of one device to 1e-10: a model of NNX, and one of variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import replicax
from tests.conftest import strategy_of
from tests.programs.programs import third_party

RNG = np.random.default_rng(0)
BATCHES = [(RNG.normal(size=(8, 6)), RNG.integers(0, 4, 8).astype(np.int32)) for _ in range(3)]
# Not Adam: it makes numbers that are nothing but rounding as large as others.
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(6, 16, param_dtype=jnp.float64, rngs=rngs)
        self.norm = nnx.LayerNorm(16, param_dtype=jnp.float64, rngs=rngs)
        self.last = nnx.Linear(16, 4, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(jnp.tanh(self.norm(self.first(x))))


def of_nnx(strategy: replicax.Strategy) -> Any:
    model = Net()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        def loss_fn(model: Any) -> Any:
            return replicax.compute_average_loss(optax.softmax_cross_entropy_with_integer_labels(model(x), y))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return replicax.get_replica_context().all_reduce("sum", loss)

    losses = [strategy.run(step, args=(model, optimizer, *b)) for b in strategy.distribute_dataset(BATCHES)]
    return losses, nnx.as_pure(nnx.state(model))


def of_variables(strategy: replicax.Strategy) -> Any:
    """A plain pytree, as variables."""
    a, b = jax.random.split(jax.random.key(0))
    with strategy.scope():
        params = replicax.as_variables({"w": jax.random.normal(a, (6, 16)), "v": jax.random.normal(b, (16, 4))})
        optimizer = replicax.Optimizer(TX)

    def loss_fn(params: Any, x: Any, y: Any) -> Any:
        logits = jnp.tanh(x @ params["w"]) @ params["v"]
        return replicax.compute_average_loss(optax.softmax_cross_entropy_with_integer_labels(logits, y))

    def step(x: Any, y: Any) -> Any:
        loss, grads = replicax.value_and_grad(loss_fn, params)(params, x, y)
        optimizer.apply_gradients(grads, params)
        return replicax.get_replica_context().all_reduce("sum", loss)

    losses = [strategy.run(step, args=b) for b in strategy.distribute_dataset(BATCHES)]
    return losses, replicax.as_arrays(params)


@pytest.mark.parametrize("program", [of_nnx, of_variables])
@third_party
def test_four_replicas_are_one_device(program: Callable[[replicax.Strategy], Any]) -> None:
    expected = jax.tree.leaves(program(strategy_of(1)))
    found = jax.tree.leaves(program(strategy_of(4)))
    assert {np.asarray(x).dtype for x in expected[:3]} == {np.dtype(np.float64)}
    for ours, theirs in zip(found, expected, strict=True):
        if jnp.issubdtype(theirs.dtype, jnp.floating):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)
