"""Programs whose replicas communicate; the references combine all replicas' inputs in one function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import replicax
from tests.programs.programs import AXIS, integers, normal, program, together, weights

Array = jax.Array


def _context() -> replicax.ReplicaContext:
    context = replicax.get_replica_context()
    assert context is not None
    return context


def _same_for_all(fn: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The reference of a program with one result for all: ``fn`` of the stacked inputs."""
    return lambda xs, *shared: [fn(np.stack(xs), *shared)] * len(xs)


def _each(fn: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The reference whose result for replica i is ``fn(i, stacked inputs, …)``."""
    return lambda xs, *shared: [fn(i, np.stack(xs), *shared) for i in range(len(xs))]


# --- every collective -----------------------------------------------------------------------------------


def _reduced(xs: list[Any]) -> list[Any]:
    x, count = np.stack([v["x"] for v in xs]), np.stack([v["count"] for v in xs])
    sums = {"count": count.sum(0, dtype=np.int32), "x": x.sum(0)}
    means = {"count": count.mean(0, dtype=np.float32), "x": x.mean(0)}
    return [(sums, means, np.concatenate(x, axis=1), x[i] * 2) for i in range(len(xs))]


@program("MMMMMT", together(x=normal(2, 3), count=integers(0, 9, 2)), across=_reduced)
def reductions_of_the_replica_context(data: Any) -> Any:
    context = _context()
    gathered = context.all_gather(data["x"], axis=-1)
    return context.all_reduce("sum", data), context.all_reduce("mean", data), gathered, data["x"] * 2


@program("MMMMM", normal(4, 2), across=_same_for_all(lambda x: (x.sum(0), x.mean(0), x.max(0), x.min(0), x)))
def agreeing_collectives_of_jax_lax(x: Array) -> Any:
    reductions = [f(x, AXIS) for f in (lax.psum, lax.pmean, lax.pmax, lax.pmin)]
    return *reductions, lax.all_gather(x, AXIS)


def _handed_out(i: int, x: Any) -> Any:
    n = len(x)
    size = 4 // n
    part = slice(i * size, (i + 1) * size)
    places = np.arange(4, dtype=np.int32)
    return x[(i - 1) % n], x.sum(0)[part], np.concatenate(x[:, part]), np.int32(i), n * places[part]


@program("TTTTT", normal(4, 2), across=_each(_handed_out))
def disagreeing_collectives_of_jax_lax(x: Array) -> Any:
    n = lax.axis_size(AXIS)
    ring = [(i, (i + 1) % n) for i in range(n)]
    return (
        lax.ppermute(x, AXIS, ring),
        lax.psum_scatter(x, AXIS, tiled=True),
        lax.all_to_all(x, AXIS, 0, 0, tiled=True),
        lax.axis_index(AXIS),
        lax.psum_scatter(jnp.arange(4), AXIS, tiled=True),  # parts differ, even of what all share
    )


@program("TM", normal(3), across=_each(lambda i, x: (x[i // 2 * 2 : i // 2 * 2 + 2].sum(0), x.sum(0))), differ=False)
def sums_within_groups(x: Array) -> Any:
    n = lax.axis_size(AXIS)
    groups = [[i, i + 1] for i in range(0, n, 2)] if n > 1 else [[0]]
    return lax.psum(x, AXIS, axis_index_groups=groups), lax.psum(x, AXIS)


@program("MTM", normal(3), shared=weights((3,)), across=_each(lambda i, x, a: (len(x) * a, len(x) * x[i], x.sum(0))))
def sums_of_what_all_share_count_it_n_times(x: Array, a: Array) -> Any:
    return lax.psum(a, AXIS), x * lax.psum(1, AXIS), _context().all_reduce("sum", [x])[0]


# --- inside loops, branches and calls -------------------------------------------------------------------


def _momentum(i: int, x: Any) -> Any:
    average, local = np.zeros(2, np.float32), np.zeros(2, np.float32)
    for step in range(3):
        average = np.float32(0.9) * average + x[:, step].mean(0)
        local = local + x[i, step] * average
    return average, local


@program("MT", normal(3, 2), across=_each(_momentum))
def a_collective_in_scan(x: Array) -> Any:
    def body(carry: Any, row: Array) -> Any:
        average, local = carry
        average = 0.9 * average + _context().all_reduce("mean", row)
        return (average, local + row * average), None

    return lax.scan(body, (jnp.zeros(2), jnp.zeros(2)), x)[0]


def _until_all_are_small(i: int, x: Any) -> Any:
    turns = 0
    while np.abs(x).max() > 0.2:
        x, turns = x * np.float32(0.5), turns + 1
    return x[i], np.int32(turns)


@program("TM", normal(3), across=_each(_until_all_are_small))
def a_collective_in_while_that_decides_for_all(x: Array) -> Any:
    def going(carry: Any) -> Array:
        return lax.pmax(jnp.abs(carry[0]).max(), AXIS) > 0.2

    return lax.while_loop(going, lambda c: (c[0] * 0.5, c[1] + 1), (x, jnp.int32(0)))


@program("MTT", normal(3), shared=lambda: (4,), across=_each(lambda i, x, k: (x.sum(0), x[i] * 2, x[i] - x.mean(0))))
def a_collective_in_cond_that_is_the_same_for_all(x: Array, k: Array) -> Any:
    every_second = lax.cond(k % 2 == 0, lambda: lax.psum(x, AXIS), lambda: jnp.zeros(3))
    agreed = lax.psum(x.sum(), AXIS) > 1e6  # computed from data, and yet the same everywhere
    mine = lax.cond(agreed, lambda: lax.psum(x, AXIS), lambda: x * 2)
    branches = [lambda v: v, lambda v: v - lax.pmean(v, AXIS)]
    return every_second, mine, lax.switch(k // 3, branches, x)


def _reduced_in_calls(x: Any) -> Any:
    return x.sum(0), np.tanh(x).mean(0), (x**2).sum(0)


@program("MMM", normal(3, 2), across=_same_for_all(_reduced_in_calls))
def collectives_in_jit_checkpoint_and_vmap(x: Array) -> Any:
    @jax.jit
    def summed(v: Array) -> Array:
        return lax.psum(v, AXIS)

    @jax.checkpoint
    def averaged(v: Array) -> Array:
        return lax.pmean(jnp.tanh(v), AXIS)

    return summed(x), averaged(x), jax.vmap(lambda row: summed(row**2))(x)


@program("T", normal(3), across=_same_for_all(lambda x: x.sum(0)), differ=False)
def a_ring_of_partial_sums(x: Array) -> Any:
    # The replicas end up with the same, but only arithmetic knows that.
    n = lax.axis_size(AXIS)
    ring = [(i, (i + 1) % n) for i in range(n)]

    def body(carry: Any, _: None) -> Any:
        total, travelling = carry
        travelling = lax.ppermute(travelling, AXIS, ring)
        return (total + travelling, travelling), None

    return lax.scan(body, (x, x), length=n - 1)[0][0]


# --- derivatives ----------------------------------------------------------------------------------------
# Each replica differentiates its own loss, and what it gets is the derivative of the sum of all losses with
# respect to its own input. So the reference differentiates that sum.


def _gradients_of_sum(loss: Callable[..., Any]) -> Callable[..., list[Any]]:
    def summed(x: Array, *shared: Any) -> Any:
        losses = jax.vmap(lambda i: loss(i, x, *shared))(jnp.arange(len(x)))
        return losses.sum(), losses

    def across(xs: list[Any], *shared: Any) -> list[Any]:
        gradients, losses = jax.jit(jax.grad(summed, has_aux=True))(np.stack(xs), *shared)
        return list(zip(np.asarray(losses), np.asarray(gradients), strict=True))

    return across


@program(
    "TT", normal(3), shared=weights((3,)), across=_gradients_of_sum(lambda i, x, a: (x.sum(0) * x[i] ** 2 * a).sum())
)
def gradient_through_a_sum(x: Array, a: Array) -> Any:
    return jax.value_and_grad(lambda x: (_context().all_reduce("sum", x) * x**2 * a).sum())(x)


@program("TT", normal(3), across=_gradients_of_sum(lambda i, x: (x**2).mean(0)[i % 3] * x[i].sum()))
def gradient_through_a_mean_in_scan(x: Array) -> Any:
    mine = lax.axis_index(AXIS) % 3

    def loss(x: Array) -> Array:
        def body(carry: Array, value: Array) -> Any:
            return carry, _context().all_reduce("mean", value**2)

        return lax.scan(body, jnp.zeros(()), x)[1][mine] * x.sum()

    return jax.value_and_grad(loss)(x)


def _contrast(i: int, x: Array) -> Array:
    unit = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    mine, others = unit[i], unit.reshape(-1, x.shape[-1])
    labels = i * x.shape[1] + jnp.arange(x.shape[1])
    scores = jax.nn.log_softmax(mine @ others.T * 3, axis=-1)
    return -(scores[jnp.arange(x.shape[1]), labels]).mean()


@program("TT", normal(2, 3), across=_gradients_of_sum(_contrast))
def contrastive_loss_over_gathered_embeddings(x: Array) -> Any:
    def loss(x: Array) -> Array:
        unit = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        everyone = _context().all_gather(unit, axis=0)
        labels = lax.axis_index(AXIS) * 2 + jnp.arange(2)
        scores = jax.nn.log_softmax(unit @ everyone.T * 3, axis=-1)
        return -(scores[jnp.arange(2), labels]).mean()

    return jax.value_and_grad(loss)(x)


def _normalised(x: Array, mean: Array, variance: Array, scale: Array) -> Array:
    return (x - mean[None]) * lax.rsqrt(variance + 1e-3)[None] * scale[None]


def _normalised_loss(i: int, x: Array, scale: Array) -> Array:
    flat = x.reshape(-1, x.shape[-1])
    return (_normalised(x[i], flat.mean(0), (flat**2).mean(0) - flat.mean(0) ** 2, scale) ** 3).mean()


@program("TT", normal(4, 3), shared=weights((3,)), across=_gradients_of_sum(_normalised_loss))
def batch_normalisation_over_all_replicas(x: Array, scale: Array) -> Any:
    def loss(x: Array) -> Array:
        mean, square = _context().all_reduce("mean", (x.mean(0), (x**2).mean(0)))
        return (_normalised(x, mean, square - mean**2, scale) ** 3).mean()

    return jax.value_and_grad(loss)(x)


def _mean_gradient(xs: list[Any], w: Any) -> list[Any]:
    def loss(w: Any, x: Any) -> Any:
        return jnp.square(jnp.tanh(x @ w)).mean()

    gradients = [jax.grad(loss)(w, x) for x in xs]
    mean = functools.reduce(jnp.add, gradients) / len(xs)
    return [(w - 0.1 * mean, jnp.linalg.norm(mean), g) for g in gradients]


@program("MMT", normal(4, 3), shared=weights((3,)), across=_mean_gradient)
def descent_along_the_mean_gradient(x: Array, w: Array) -> Any:
    gradient = jax.grad(lambda w: jnp.square(jnp.tanh(x @ w)).mean())(w)
    mean = _context().all_reduce("mean", gradient)
    return w - 0.1 * mean, jnp.linalg.norm(mean), gradient


def _layer_sum(i: int, x: Array, w: Array) -> Array:
    return jnp.tanh((jnp.tanh(x) * w[None]).sum(0)).sum() * x[i].sum()


@program("TT", normal(3), shared=weights((3,)), across=_gradients_of_sum(_layer_sum))
def gradient_of_a_checkpointed_layer_with_a_custom_rule_and_a_sum(x: Array, w: Array) -> Any:
    @jax.custom_vjp
    def squash(v: Array) -> Array:
        return jnp.tanh(v)

    squash.defvjp(lambda v: (jnp.tanh(v),) * 2, lambda y, g: (g * (1 - y * y),))

    @jax.checkpoint
    def layer(x: Array) -> Array:
        return jnp.tanh(lax.psum(squash(x) * w, AXIS)).sum()

    return jax.value_and_grad(lambda x: layer(x) * x.sum())(x)


def _transposed(xs: list[Any]) -> list[Any]:
    total, n = np.stack(xs).sum(0), len(xs)
    return [(total, total / np.float32(n), 2 * total, 2 * total, x) for x in xs]


@program("MMTTT", normal(2), across=_transposed, differ=False)
def transposes_of_collectives(x: Array) -> Any:
    context = _context()
    ring = replicax.CommunicationOptions(implementation="ring")
    # Each replica's cotangent of the whole is twice what it has itself, for each of the parts.
    whole = jnp.concatenate([2 * x] * context.num_replicas_in_sync)
    gathers = [lambda v: context.all_gather(v, 0), lambda v: context.all_gather(v, 0, ring)]
    functions = [lambda v: context.all_reduce("sum", v), lambda v: context.all_reduce("mean", v), *gathers]
    total, mean, *parts = (
        jax.linear_transpose(f, x)(ct)[0] for f, ct in zip(functions, [x, x, whole, whole], strict=True)
    )
    share = jax.linear_transpose(lambda v: replicax.compute_average_loss(v, global_batch_size=1), x)
    return total, mean, *parts, share(jnp.float32(1))[0] * x


def _centred(i: int, x: Array, a: Array) -> Array:
    return ((x[i] - x.mean(0)) * a).sum() ** 2


@program("TT", normal(3), shared=weights((3,)), across=_gradients_of_sum(_centred))
def a_custom_rule_that_reduces_values_and_tangents_together(x: Array, a: Array) -> Any:
    @jax.custom_jvp
    def centre(x: Array) -> Array:
        return x - _context().all_reduce("mean", x)

    @centre.defjvp
    def _centre_jvp(primals: Any, tangents: Any) -> Any:
        (x,), (dx,) = primals, tangents
        mean, change = _context().all_reduce("mean", (x, dx))
        return x - mean, dx - change

    def body(carry: Array, _: None) -> Any:
        return carry, jax.jit(lambda v: (centre(v) * a).sum())(carry)

    def loss(x: Array) -> Array:
        first, second = lax.scan(body, x, length=2)[1]
        return first * second

    return jax.value_and_grad(loss)(x)
