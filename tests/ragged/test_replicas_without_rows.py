"""Losses whose derivative JAX drops on replicas without rows: the others' gradients are those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from tests.conftest import strategy_of

here = replicax.get_replica_context
WEIGHTS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
ROWS = np.sin(np.arange(16, dtype=np.float32)).reshape(4, 4)
LABELS = np.array([0, 2, 1, 2], np.int32)
NUMBERS = np.arange(4, dtype=np.int32)


def batches(strategy: replicax.Strategy, sizes: tuple[int, ...]) -> tuple[Any, ...]:
    ends = np.cumsum(sizes)

    def part(ctx: Any) -> tuple[Any, ...]:
        end = ends[ctx.replica_id_in_sync_group]
        own = slice(end - sizes[ctx.replica_id_in_sync_group], end)
        return ROWS[own], LABELS[own], NUMBERS[own]

    return strategy.distribute_values_from_function(part)  # type: ignore[return-value]


# --- losses of each example; ``gather`` gathers rows --------------------------------------------------------


def masked(w: Any, x: Any, labels: Any, numbers: Any, gather: Callable[..., Any]) -> Any:
    """Contrastive: each example is compared with all others."""
    mine = x @ w
    theirs = gather(mine)
    own = numbers[:, None] == gather(numbers)[None]
    return jax.nn.logsumexp(jnp.where(own, -1e9, mine @ theirs.T), axis=1)


def indexed(w: Any, x: Any, labels: Any, numbers: Any, gather: Callable[..., Any]) -> Any:
    logits = x @ w - gather(x @ w).mean(0)[None]
    return -jax.nn.log_softmax(logits)[jnp.arange(len(x)), labels]


def taken(w: Any, x: Any, labels: Any, numbers: Any, gather: Callable[..., Any]) -> Any:
    """The gather is inside a jitted helper."""
    rows = jax.jit(lambda x: gather(jnp.tanh(x @ w)))(x)
    return jnp.take(rows, labels, axis=0).sum(1) * (x @ w)[:, 0]


def two_heads(w: Any, x: Any, labels: Any, numbers: Any, gather: Callable[..., Any]) -> Any:
    """Two gathers of one shape, of which one has a gradient everywhere."""
    second = gather(jnp.tanh(x @ w))
    first = gather(x @ w)
    return jnp.where(labels[:, None] > 0, first[numbers], 0.0).sum(1) + (x @ w @ second.T).sum(1)


LOSSES = [masked, indexed, taken, two_heads]


def with_variable(loss: Callable[..., Any], w: replicax.Variable) -> Any:
    return replicax.value_and_grad(lambda: loss(w.value), [w])()


def with_jax(loss: Callable[..., Any], w: replicax.Variable) -> Any:
    value, gradient = jax.value_and_grad(loss)(w.value)
    return value, [gradient]


def trained(
    strategy: replicax.Strategy, sizes: tuple[int, ...], losses: Any, differentiated: Any, executor: Any
) -> Any:
    with strategy.scope():
        w = replicax.Variable(WEIGHTS)

    def step(*batch: Any) -> Any:
        def loss(w: Any) -> Any:
            # The second term differs from zero on every replica, also on those without rows.
            gathered = here().all_gather(jnp.tanh(batch[0] @ w), axis=0)
            each = losses(w, *batch, lambda rows: here().all_gather(rows, axis=0))
            return replicax.compute_average_loss(each) + replicax.as_share(jnp.sum(gathered**2) / 10)

        share, gradients = differentiated(loss, w)
        total, [gradient] = here().all_reduce("sum", (share, gradients))
        w.assign_sub(0.1 * gradient)
        return total

    total = strategy.run(step, args=batches(strategy, sizes), options=replicax.RunOptions(executor=executor))
    return float(total), w.numpy()


@pytest.mark.covering(1)
@pytest.mark.parametrize("sizes", [(2, 2, 0), (0, 4, 0)])
@pytest.mark.parametrize(
    ("differentiated", "executor"),
    [(with_variable, "compiled"), (with_jax, "compiled"), (with_variable, "per_replica")],
)
@pytest.mark.parametrize("losses", LOSSES, ids=lambda fn: fn.__name__)
def test_gradients_are_those_of_the_whole_batch(
    sizes: tuple[int, ...], losses: Any, differentiated: Any, executor: Any
) -> None:
    def whole(w: Any) -> Any:
        each = losses(w, ROWS, LABELS, NUMBERS, lambda rows: jnp.asarray(rows))
        return each.mean() + len(sizes) * jnp.sum(jnp.tanh(ROWS @ w) ** 2) / 10

    expected, gradient = jax.jit(jax.value_and_grad(whole))(WEIGHTS)
    total, w = trained(strategy_of(len(sizes)), sizes, losses, differentiated, executor)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    np.testing.assert_allclose(w, WEIGHTS - 0.1 * gradient, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_another_collective_is_missed_with_an_error_that_says_why() -> None:
    """What the others send back to a replica without rows could belong to its own parameters."""
    strategy = strategy_of(3)
    with strategy.scope():
        w = replicax.Variable(WEIGHTS)

    def step(x: Any, labels: Any, _: Any) -> Any:
        def loss() -> Any:
            centers = here().all_reduce("sum", jax.ops.segment_sum(x @ w.value, labels, 3))
            return replicax.compute_average_loss(-jax.nn.log_softmax(x @ w.value @ centers)[jnp.arange(len(x)), labels])

        share, gradients = replicax.value_and_grad(loss, [w])()
        w.assign_sub(here().all_reduce("sum", (share, gradients))[1][0])

    with pytest.raises(replicax.errors.DeadlockError, match="not all replicas reach the same collective") as caught:
        strategy.run(step, args=batches(strategy, (2, 1, 0)))
    for said in ("JAX drops the gradients of operations such as jnp.where", "as one compiled program"):
        assert any(said in note for note in caught.value.__notes__)
    np.testing.assert_array_equal(w.numpy(), WEIGHTS)
