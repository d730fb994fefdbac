"""Models of Flax NNX, whose state is an argument that all replicas share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import replicax
from tests.programs.programs import AXIS, by_replica, integers, normal, program, third_party, together

Array = jax.Array


def _split(make: Callable[[nnx.Rngs], Any]) -> Callable[[], Any]:
    """The structure and the state of a module, as shared arguments; it is made once."""

    @functools.cache
    def shared() -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return nnx.split(make(nnx.Rngs(0)))

    return shared


def _sequence(*layers: Callable[[nnx.Rngs], Any]) -> Callable[[nnx.Rngs], Any]:
    return lambda rngs: nnx.Sequential(*(layer(rngs) for layer in layers))


_MLP = _split(
    _sequence(
        lambda r: nnx.Linear(3, 8, rngs=r),
        lambda r: nnx.LayerNorm(8, rngs=r),
        lambda r: jax.nn.relu,
        lambda r: nnx.Linear(8, 4, rngs=r),
    )
)


@program("TTTTTTTM", together(x=normal(4, 3), y=integers(0, 4, 4)), shared=_MLP)
@third_party
def nnx_gradients(batch: Any, graph: Any, state: Any) -> Any:
    model = nnx.merge(graph, state)

    def loss(model: Any) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    mirrored = nnx.grad(lambda model: model(jnp.ones((1, 3))).sum())(model)
    return value, gradients, jax.tree.leaves(mirrored)[-1]


_CONV = _split(_sequence(lambda r: nnx.Conv(2, 4, (3, 3), rngs=r), lambda r: nnx.BatchNorm(4, momentum=0.9, rngs=r)))


@program("TMMMTMT", normal(2, 5, 5, 2), shared=_CONV)
@third_party
def nnx_batch_norm_of_each_replica(x: Array, graph: Any, state: Any) -> Any:
    model = nnx.merge(graph, state)
    out = model(x)
    return out, nnx.state(model)


def _batch_norm(axis: str | None) -> Callable[[nnx.Rngs], Any]:
    return lambda rngs: nnx.BatchNorm(3, momentum=0.9, axis_name=axis, rngs=rngs)


def _statistics_of_all(xs: list[Any], *_: Any) -> list[Any]:
    x = np.concatenate(xs)
    mean, variance = x.mean(0), x.var(0)
    outs = [((x - mean) / np.sqrt(variance + 1e-5)).astype(np.float32) for x in xs]
    return [(out, 0.1 * mean, np.float32(0.9) + np.float32(0.1) * variance) for out in outs]


@program("TMM", normal(4, 3), shared=_split(_batch_norm(AXIS)), across=_statistics_of_all)
@third_party
def nnx_batch_norm_of_all_replicas(x: Array, graph: Any, state: Any) -> Any:
    model = nnx.merge(graph, state)
    out = model(x)
    return out, model.mean[...], model.var[...]


def _dropped(replica: Any, x: Array, graph: Any, state: Any) -> Any:
    model = nnx.merge(graph, state)
    key = jax.random.fold_in(jax.random.key(4), replica)
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=key))
    common = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=1))
    return dropout(jnp.ones((2, 9))), common(model(x)), common(jnp.ones((2, 3)))


@program(
    "TTM", normal(2, 3), shared=_split(lambda r: nnx.Linear(3, 4, rngs=r)), across=by_replica(third_party(_dropped))
)
@third_party
def nnx_dropout_keyed_for_each_replica(x: Array, graph: Any, state: Any) -> Any:
    context = replicax.get_replica_context()
    return _dropped(context.replica_id_in_sync_group, x, graph, state)


@program("TM", normal(2, 3), shared=_split(lambda r: nnx.Dropout(0.5, rngs=r)), differ=False)
@third_party
def nnx_dropout_from_a_stream_in_the_state(x: Array, graph: Any, state: Any) -> Any:
    model = nnx.merge(graph, state)
    return model(model(x)), nnx.state(model, nnx.RngCount)


@program("TM", normal(2, 4, 6), shared=_split(lambda r: nnx.MultiHeadAttention(2, 6, decode=False, rngs=r)))
@third_party
def nnx_attention(x: Array, graph: Any, state: Any) -> Any:
    model = nnx.merge(graph, state)
    return model(x, mask=nnx.make_causal_mask(x[..., 0])), model(jnp.ones((1, 2, 6)))


@program("TT", normal(2, 4, 3), shared=_split(lambda r: nnx.RNN(nnx.LSTMCell(3, 4, rngs=r))))
@third_party
def nnx_lstm(x: Array, graph: Any, state: Any) -> Any:
    model = nnx.merge(graph, state)
    value, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    return value, gradients["cell"]["hi"]["kernel"]


class Counter(nnx.Variable[Array]):
    pass


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.calls = Counter(jnp.zeros((), jnp.int32))
        self.last = Counter(jnp.zeros(3))

    def __call__(self, h: Array) -> Array:
        self.calls[...] += 1
        h = jnp.tanh(self.linear(h))
        self.last[...] = h.mean(0)
        return h


@program("TMT", normal(2, 3), shared=_split(Block))
@third_party
def nnx_variables_written_in_remat_and_jit(x: Array, graph: Any, state: Any) -> Any:
    model = nnx.merge(graph, state)

    @nnx.jit
    def twice(model: Any, h: Array) -> Array:
        return model(nnx.remat(lambda model, h: model(h))(model, h))

    return twice(model, x), nnx.state(model, Counter)


@nnx.split_rngs(splits=3)
@nnx.vmap
def _blocks(rngs: nnx.Rngs) -> Block:
    return Block(rngs)


@program("TMT", normal(2, 3), shared=_split(_blocks))
@third_party
def nnx_layers_by_scan(x: Array, graph: Any, state: Any) -> Any:
    layers = nnx.merge(graph, state)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(layer: Any, h: Array) -> Array:
        return layer(h)

    return forward(layers, x), nnx.state(layers, Counter)


@jax.jit
@third_party
def _trained(xs: list[Any], graph: Any, state: Any) -> list[Any]:
    model, optimizer = nnx.merge(graph, state)
    gradients = [nnx.grad(_square_loss)(model, x) for x in xs]
    optimizer.update(model, jax.tree.map(lambda *g: sum(g) / len(xs), *gradients))
    return [nnx.state((model, optimizer))] * len(xs)


def _square_loss(model: Any, x: Array) -> Array:
    return jnp.square(model(x)).mean()


def _model_and_optimizer(rngs: nnx.Rngs) -> Any:
    model = nnx.Linear(3, 2, rngs=rngs)
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


@program("MMMMMMMM", normal(4, 3), shared=_split(_model_and_optimizer), across=_trained)
@third_party
def nnx_optimizer_with_reduced_gradients(x: Array, graph: Any, state: Any) -> Any:
    model, optimizer = nnx.merge(graph, state)
    gradients = nnx.grad(_square_loss)(model, x)
    optimizer.update(model, lax.pmean(gradients, AXIS))
    return nnx.state((model, optimizer))
