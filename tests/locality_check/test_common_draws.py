"""Random numbers that examples of all replicas have in common are told; what is to be the same everywhere is not."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax

ROWS, FEATURES = 4, 4
"""As many features as rows, so that a size alone says nothing."""

X = np.arange(2 * ROWS * FEATURES, dtype=np.float32).reshape(2 * ROWS, FEATURES) / 10
WRONG: list[Callable[[Any, Any, Any], Any]] = []
RIGHT: list[Callable[[Any, Any, Any], Any]] = []


def wrong(step: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    WRONG.append(step)
    return step


def right(step: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    RIGHT.append(step)
    return step


@wrong
def dropout(key: Any, w: Any, x: Any) -> Any:
    kept = jax.random.bernoulli(key, 0.5, x.shape)  # wrong
    return jnp.where(kept, x / 0.5, 0.0) @ w


@wrong
def dropout_of_a_layer(key: Any, w: Any, x: Any) -> Any:
    h = jax.nn.relu(x @ w)
    return h * jax.random.bernoulli(key, 0.5, h.shape)  # wrong


@wrong
def noise(key: Any, w: Any, x: Any) -> Any:
    return (x + 0.1 * jax.random.normal(jax.random.fold_in(key, 1), x.shape)) @ w  # wrong


@wrong
def noise_of_channels_first(key: Any, w: Any, x: Any) -> Any:
    return x.T + jax.random.normal(key, (ROWS, FEATURES)).T  # wrong


@wrong
def a_flip_for_each_example(key: Any, w: Any, x: Any) -> Any:
    flips = jax.random.bernoulli(key, 0.5, (x.shape[0],))  # wrong
    return jnp.where(flips[:, None], x[:, ::-1], x) @ w


@wrong
def a_key_for_each_example(key: Any, w: Any, x: Any) -> Any:
    return jax.vmap(lambda key, x: x + jax.random.normal(key, x.shape))(jax.random.split(key, x.shape[0]), x)  # wrong


@wrong
def actions(key: Any, w: Any, x: Any) -> Any:
    return jax.random.categorical(key, x @ w)  # wrong


@wrong
def dropout_in_a_scan_over_layers(key: Any, w: Any, x: Any) -> Any:
    def layer(h: Any, key: Any) -> Any:
        return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h @ w, 0.0), None  # wrong

    return jax.lax.scan(layer, x, jax.random.split(key, 3))[0]


@wrong
def dropout_that_is_differentiated(key: Any, w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        h = x @ w
        return jnp.mean(jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0.0))  # wrong

    return replicax.get_replica_context().all_reduce("mean", jax.grad(loss)(w))


@right
def own_key(key: Any, w: Any, x: Any) -> Any:
    key = replicax.get_replica_context().random_key(key)
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0) @ w


@right
def key_folded_by_hand(key: Any, w: Any, x: Any) -> Any:
    key = jax.random.fold_in(key, replicax.get_replica_context().replica_id_in_sync_group)
    return x + jax.random.normal(key, x.shape)


@right
def parameters(key: Any, w: Any, x: Any) -> Any:
    return x @ jax.random.normal(key, (FEATURES, FEATURES)) + jax.random.normal(key, (FEATURES,))


@right
def one_mask_for_all_examples(key: Any, w: Any, x: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.5, (FEATURES,)), x, 0.0) @ w


@right
def noise_on_weights(key: Any, w: Any, x: Any) -> Any:
    return x @ (w + jax.random.normal(key, w.shape))


@right
def noise_on_gradients(key: Any, w: Any, x: Any) -> Any:
    gradient = jax.grad(lambda w: jnp.mean(x @ w))(w)
    return replicax.get_replica_context().all_reduce("mean", gradient + jax.random.normal(key, gradient.shape))


@right
def the_same_order_everywhere(key: Any, w: Any, x: Any) -> Any:
    return x[jax.random.permutation(key, x.shape[0])] @ w


@right
def a_number_for_the_batch(key: Any, w: Any, x: Any) -> Any:
    return x * jax.random.uniform(key) + jax.random.beta(key, 0.2, 0.2) * x[::-1]


@right
def numbers_that_are_printed(key: Any, w: Any, x: Any) -> Any:
    jax.debug.print("{} {}", x, jax.random.normal(key, x.shape))
    return x @ w


@right
def values_beside_the_examples(key: Any, w: Any, x: Any) -> Any:
    return jnp.sum(x @ w), jax.random.normal(key, (ROWS, FEATURES))


def told(pair: replicax.MirroredStrategy, step: Any, *, typed: bool = True) -> list[warnings.WarningMessage]:
    key = jax.random.key(0) if typed else jax.random.PRNGKey(0)
    [batch] = pair.distribute_dataset([X])
    with warnings.catch_warnings(record=True) as found, jax.numpy_dtype_promotion("standard"):
        warnings.simplefilter("always")
        with jax.numpy_rank_promotion("allow"):
            pair.extended.trace(step, args=(key, np.ones((FEATURES, FEATURES), np.float32), batch))
    return found


@pytest.mark.parametrize("typed", [True, False], ids=["typed", "raw"])
@pytest.mark.parametrize("step", WRONG, ids=[step.__name__ for step in WRONG])
def test_common_numbers_are_told(pair: replicax.MirroredStrategy, step: Any, typed: bool) -> None:
    [warning] = told(pair, step, typed=typed)
    assert warning.category is replicax.errors.LocalityWarning
    for part in (
        repr(step.__name__),
        "same on all 2 replicas",
        __file__,
        "random_key(key)",
        "fold_in(key, replica_id)",
    ):
        assert part in str(warning.message)
    assert "# wrong" in linecache.getline(warning.filename, warning.lineno)


@pytest.mark.parametrize("step", RIGHT, ids=[step.__name__ for step in RIGHT])
def test_right_numbers_are_not(pair: replicax.MirroredStrategy, step: Any) -> None:
    assert [str(warning.message) for warning in told(pair, step)] == []


@pytest.mark.covering(1)
@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
@pytest.mark.parametrize(
    "make", [jax.random.key, jax.random.PRNGKey, lambda seed: jax.random.split(jax.random.key(seed), 3)]
)
def test_keys_of_replicas(pair: replicax.Strategy, executor: str, make: Any) -> None:
    key = make(7)
    options = replicax.RunOptions(executor=executor)
    mine = pair.run(lambda k: replicax.get_replica_context().random_key(k), args=(key,), options=options)
    fold = jax.vmap(jax.random.fold_in, (0, None)) if key.shape == (3,) else jax.random.fold_in
    data = jax.random.key_data if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jnp.asarray
    for replica, found in enumerate(pair.local_results(mine)):
        assert data(found).tolist() == data(fold(key, replica)).tolist()
