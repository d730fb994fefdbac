"""Where the pass says that the examples are, on ordinary models; and that it is true.

There are as many classes, features and places in time as rows: a size tells nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import replicax
from replicax.padding.example_places import PART, UNKNOWN, Index, Rows, Untraceable
from replicax.padding.examples import ExamplesPass
from tests.conftest import strategy_of
from tests.padding.padded_batches import padded_batch

ROWS = 4
PER_REPLICA = replicax.RunOptions(executor="per_replica")
rng = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return rng.normal(size=shape).astype(np.float32)


W, V, B = normal(4, 4), normal(4, 4), normal(1, 4)
TABLE = normal(4, 4)
FILTERS, MORE = normal(3, 3, 2, 4) * 0.3, normal(3, 3, 4, 4) * 0.3
WX, WH = normal(4, 16) * 0.5, normal(4, 16) * 0.5
QKV = normal(4, 12)


def batch(size: int) -> dict[str, np.ndarray[Any, Any]]:
    own = np.random.default_rng(1)
    return {
        "x": own.normal(size=(8, 4)).astype(np.float32)[:size],
        "y": own.integers(0, 4, 8)[:size],
        "image": own.normal(size=(8, 4, 4, 2)).astype(np.float32)[:size],
        "words": own.integers(0, 4, (8, 4))[:size],
        "series": own.normal(size=(8, 4, 4)).astype(np.float32)[:size],
    }


def mlp(x: Any) -> Any:
    return jnp.tanh(x @ W + B) @ V


def cross_entropy(b: Any) -> Any:
    logits = mlp(b["x"])
    shifted = logits - lax.stop_gradient(logits.max(1, keepdims=True))
    scores = shifted - jnp.log(jnp.exp(shifted).sum(1, keepdims=True))
    return -scores[jnp.arange(len(scores)), b["y"]], logits


def labels_by_take_along_axis(b: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(mlp(b["x"])), b["y"][:, None], axis=-1)[:, 0]


def labels_by_one_hot(b: Any) -> Any:
    hot = jax.nn.one_hot(b["y"], 4)
    return -(hot * jax.nn.log_softmax(mlp(b["x"]))).sum(-1), hot, mlp(b["x"]).argmax(-1) == b["y"]


def optax_losses(b: Any) -> Any:
    logits = mlp(b["x"])
    return (
        optax.softmax_cross_entropy_with_integer_labels(logits, b["y"]),
        optax.sigmoid_binary_cross_entropy(logits, jax.nn.one_hot(b["y"], 4)),
        optax.huber_loss(logits, b["x"]),
        optax.cosine_distance(logits, b["x"]),
        optax.l2_loss(logits[:, 0]),
    )


def losses_by_vmap(b: Any) -> Any:
    def one(x: Any, y: Any) -> Any:
        return -jax.nn.log_softmax(jnp.tanh(x @ W) @ V)[y]

    return jax.vmap(one)(b["x"], b["y"]), jax.vmap(jax.grad(one))(b["x"], b["y"])


def convolutions(b: Any) -> Any:
    def conv(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    h = jax.nn.relu(conv(b["image"], FILTERS))
    h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    h = conv(h, MORE)
    return h.reshape(h.shape[0], -1), h.mean((1, 2))


def layer_norm(b: Any) -> Any:
    x = b["x"]
    h = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return h


def attention(b: Any) -> Any:
    rows = b["series"].shape[0]
    q, k, v = jnp.split(b["series"] @ QKV, 3, axis=-1)
    q, k, v = (t.reshape(rows, 4, 2, 2) for t in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = jnp.where(jnp.tril(jnp.ones((4, 4), bool))[None, None], scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(rows, 4, 4)


def embeddings(b: Any) -> Any:
    h = jnp.asarray(TABLE)[b["words"]]
    return h, h.sum(1), jnp.take(jnp.asarray(TABLE), b["y"], axis=0)


def layers_on_flattened_words(b: Any) -> Any:
    h = b["series"].reshape(-1, 4) @ W
    return h.reshape(-1, 4, 4)


def lstm(b: Any) -> Any:
    rows = b["series"].shape[0]

    def cell(carry: Any, x: Any) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(x @ WX + h @ WH, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((rows, 4))
    (h, _), hs = lax.scan(cell, (zeros, zeros), jnp.swapaxes(b["series"], 0, 1))
    return h, jnp.swapaxes(hs, 0, 1)


def one_example_at_a_time(b: Any) -> Any:
    def from_the_last(x: Any) -> Any:
        return lax.scan(lambda total, x: (total + x, jnp.tanh(x @ W).sum()), jnp.zeros(4), x, reverse=True)

    mapped = lax.map(lambda x: jnp.tanh(x @ W).sum(), b["x"])
    return mapped, from_the_last(b["x"])[1], jax.grad(lambda x: from_the_last(x)[1].sum())(b["x"]).sum(1)


def a_loop_of_layers(b: Any) -> Any:
    return lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ W), b["x"])


def checkpointed(b: Any) -> Any:
    return jax.checkpoint(lambda x: jnp.tanh(x @ W).sum(-1))(b["x"])


def a_branch(b: Any) -> Any:
    return lax.cond(W[0, 0] > 0, lambda x: x * 2, lambda x: x @ W, b["x"])


def within_each_example(b: Any) -> Any:
    x = b["x"]
    return jnp.sort(x, axis=-1), jnp.cumsum(x, axis=1), lax.top_k(x, 2)[0], x[:, ::-1], x[:, 1], x.at[:, 0].set(0.0)


def put_together(b: Any) -> Any:
    x = b["x"]
    return jnp.concatenate([x, x * 2], -1), jnp.stack([x, x], 1), jnp.pad(x, ((0, 0), (1, 1))), jnp.repeat(x, 2, 1)


EVERYWHERE = [
    cross_entropy,
    labels_by_take_along_axis,
    labels_by_one_hot,
    optax_losses,
    losses_by_vmap,
    convolutions,
    layer_norm,
    attention,
    embeddings,
    layers_on_flattened_words,
    lstm,
    one_example_at_a_time,
    a_loop_of_layers,
    checkpointed,
    a_branch,
    within_each_example,
    put_together,
]


@pytest.mark.parametrize(
    ("executor", "models"),
    [
        pytest.param(None, EVERYWHERE, id="compiled"),
        pytest.param(PER_REPLICA, [cross_entropy, embeddings, within_each_example], id="per_replica"),
        pytest.param(
            PER_REPLICA,
            [m for m in EVERYWHERE if m is not one_example_at_a_time],  # see the test below
            id="exact, everywhere",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_what_models_return_of_each_example_is_reduced_without_padding(executor, models, ordinary_promotion) -> None:
    # All in one step: to compile each by itself takes a minute.

    def step(b: Any) -> Any:
        return {model.__name__: model(b) for model in models}

    strategy = strategy_of(2)
    found = strategy.run(step, args=(padded_batch(strategy, batch(ROWS + 1), ROWS),), options=executor)
    expected = jax.jit(step)(batch(ROWS + 1))
    means, wholes = strategy.reduce("mean", found, axis=0), strategy.gather(found, axis=0)
    for model in models:
        of_model = zip(*(jax.tree.leaves(v[model.__name__]) for v in (found, means, wholes, expected)), strict=True)
        for value, mean, whole, wanted in of_model:
            assert (value.mask is not None, value.dim) == (True, 0), model
            np.testing.assert_allclose(mean, wanted.mean(0), rtol=2e-4, atol=2e-5, err_msg=model.__name__)
            np.testing.assert_allclose(whole, wanted, rtol=2e-4, atol=2e-5, err_msg=model.__name__)


def test_a_loop_over_examples_can_not_be_told_by_the_per_replica_executor(pair) -> None:
    out = pair.run(one_example_at_a_time, args=(padded_batch(pair, batch(5), ROWS),), options=PER_REPLICA)
    with pytest.raises(ValueError, match=r"strategy.reduce along dim 0 of a value of shape \(4,\) .* can't be told"):
        pair.reduce("mean", out, axis=0)


def places(fn: Any, *others: Any) -> list[Any]:
    """Where the examples are in what ``fn`` returns of a batch and of what is no batch."""
    closed = jax.make_jaxpr(fn)(batch(ROWS), *others)
    n = len(jax.tree.leaves(batch(ROWS)))
    inputs = [Rows(0)] * n + [None] * (len(closed.jaxpr.invars) - n)
    return ExamplesPass(ROWS).run(closed.jaxpr, inputs, final=True)[0]


def used_globals(fn: Any) -> set[str]:
    names: set[str] = set()
    codes = [fn.__code__]
    while codes:
        code = codes.pop()
        names |= set(code.co_names)
        codes += [c for c in code.co_consts if hasattr(c, "co_names")]
    return names | (used_globals(mlp) if "mlp" in names else set())


def parameters_of(model: Any) -> list[str]:
    return [n for n in ("W", "V", "TABLE", "FILTERS", "MORE", "WX", "WH", "QKV") if n in used_globals(model)]


@pytest.mark.parametrize("model", [m for m in EVERYWHERE if parameters_of(m)], ids=lambda m: m.__name__)
def test_derivatives_by_parameters_are_of_no_example(model, ordinary_promotion) -> None:
    def loss(b: Any, parameters: Any) -> Any:
        with replaced(parameters):
            return sum(jnp.sum(v * v) for v in jax.tree.leaves(model(b)) if jnp.issubdtype(v.dtype, jnp.floating))

    def gradients(b: Any, parameters: Any) -> Any:
        return jax.grad(lambda p: loss(b, p))(parameters)

    assert set(places(gradients, {n: jnp.asarray(globals()[n]) for n in parameters_of(model)})) == {None}


class replaced:  # noqa: N801
    def __init__(self, values: Any) -> None:
        self.values = values

    def __enter__(self) -> None:
        self.before = {n: globals()[n] for n in self.values}
        globals().update(self.values)

    def __exit__(self, *_: Any) -> None:
        globals().update(self.before)


NOT_OF_EXAMPLES = {
    "a sum over them": lambda b: b["x"].sum(0),
    "counts of classes": lambda b: jax.nn.one_hot(b["y"], 4).sum(0),
    "counts by scatter": lambda b: jnp.zeros(4).at[b["y"]].add(1.0),
    "statistics": lambda b: (b["x"].mean(0), b["x"].var(0)),
    "a product over them": lambda b: b["x"].T @ b["x"],
    "weighted sums": lambda b: jnp.ones((3, 4)) @ b["x"],
    "what is no input": lambda b: jnp.arange(4),
    "the largest": lambda b: b["x"].argmax(0),
}


@pytest.mark.parametrize("name", NOT_OF_EXAMPLES)
def test_what_has_the_size_of_the_batch_but_is_not_of_examples(name) -> None:
    for place in places(NOT_OF_EXAMPLES[name]):
        assert place is None or isinstance(place, Index)


ALL_DIMS = lax.ScatterDimensionNumbers((), tuple(range(ROWS)), tuple(range(ROWS)))
MIXED = {
    "sorted": lambda b: jnp.sort(b["x"], axis=0),
    "shuffled": lambda b: b["x"][jnp.argsort(b["y"])],
    "turned round": lambda b: b["x"][::-1],
    "added up so far": lambda b: jnp.cumsum(b["x"], axis=0),
    "added up from the last": lambda b: lax.scan(lambda c, x: (c + x, c), jnp.zeros(4), b["x"], reverse=True)[1],
    "added up so far by a product": lambda b: jnp.tril(jnp.ones((4, 4))) @ b["x"],
    "every with every": lambda b: b["x"] @ b["x"].T,
    "joined": lambda b: jnp.concatenate([b["x"], b["x"]])[:4],
    "a neighbour's": lambda b: jnp.roll(b["x"], 1, axis=0),
    "put at labels' places": lambda b: b["x"].at[b["y"]].set(b["x"]),
    "put at a place that all labels name": lambda b: lax.scatter(
        jnp.zeros((4,) * ROWS), b["y"], jnp.ones(()), ALL_DIMS
    ),
    "put at other rows": lambda b: jnp.zeros_like(b["x"]).at[jnp.array([3, 2, 1, 0])].set(b["x"]),
    "put into a longer array": lambda b: jnp.zeros((8, 4)).at[jnp.arange(4)].set(b["x"]),
    "put into one by numbers with no sign": lambda b: jnp.zeros((8, 4)).at[jnp.arange(4, dtype="uint32")].set(b["x"]),
    "after a row of another": lambda b: jnp.insert(b["x"], 0, 0.0, axis=0)[:-1],
    "windows of several": lambda b: jax.vmap(lambda i: lax.dynamic_slice_in_dim(b["x"], i, 2))(jnp.arange(3)),
    "rows and sorted labels": lambda b: b["x"][jnp.arange(4), jnp.sort(b["y"])],
    "rows by other numbers": lambda b: b["x"][jnp.arange(4) * 2 % 4, b["y"]],
    "put at rows and sorted labels": lambda b: jnp.zeros((4, 4)).at[jnp.arange(4), jnp.sort(b["y"])].set(1.0),
    "filters that are a batch": lambda b: lax.conv(jnp.ones((4, 4, 4, 4)), b["image"], (1, 1), "SAME"),
    "channels that are a batch": lambda b: lax.conv_general_dilated(
        b["x"][None], jnp.ones((4, 1, 2)), (1,), "SAME", feature_group_count=4
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_examples_is_unknown(name) -> None:
    [place] = places(MIXED[name])
    assert isinstance(place, Untraceable)


def test_a_number_of_one_example_does_not_pass_for_one_of_none() -> None:
    def step(b):
        rows = [jnp.tanh(b["x"][i]).sum() for i in range(ROWS)]
        return jnp.stack(rows), jnp.sort(b["x"][:, 0]).sum()

    assert places(step) == [PART, None]


def test_the_dim_is_followed() -> None:
    def step(b):
        x = b["series"]
        return jnp.swapaxes(x, 0, 1), jnp.moveaxis(x, 0, -1), x.reshape(-1, 4), x.reshape(-1, 4).reshape(4, 16)

    assert places(step) == [Rows(1), Rows(2), Rows(0, 1, 4), Rows(0)]


def test_rows_are_looked_up_by_their_reshaped_numbers() -> None:
    assert places(lambda b: b["x"][jnp.arange(ROWS).reshape(-1, 1), jnp.arange(3)]) == [Rows(0)]


def test_the_examples_move_up_where_dims_before_them_are_reduced_away() -> None:
    def step(b):
        turned = jnp.moveaxis(b["series"], 0, -1)
        return turned.sum(0), turned.max((0, 1)), turned.sum(1), turned.argmax(0), turned.sum(-1)

    assert places(step) == [Rows(1), Rows(0), Rows(1), Rows(1), None]


def test_batch_normalisation_keeps_rows_and_its_statistics_have_none(ordinary_promotion) -> None:
    def step(b):
        mean, var = b["x"].mean(0), b["x"].var(0)
        return (b["x"] - mean) / jnp.sqrt(var + 1e-5), mean

    assert places(step) == [Rows(0), None]


def test_mutable_arrays_are_unknown() -> None:
    def step(b):
        ref = jax.new_ref(jnp.zeros((4, 4)))
        ref[...] = b["x"]
        return ref[...]

    assert places(step) == [UNKNOWN]
