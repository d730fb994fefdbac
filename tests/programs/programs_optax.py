"""Losses and transformations of Optax, and a model of Equinox."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import replicax
from tests.programs.programs import integers, normal, program, third_party, together, weights

Array = jax.Array


@program("TTM", together(logits=normal(4, 5), labels=integers(0, 5, 4)), shared=weights((4, 5)))
@third_party
def optax_classification_losses(batch: Any, a: Array) -> Any:
    logits, labels = batch["logits"], batch["labels"]
    soft = optax.smooth_labels(jax.nn.one_hot(labels, 5), 0.1)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    gradient = jax.grad(lambda logits: optax.softmax_cross_entropy(logits, soft).mean())(logits)
    return losses, gradient, optax.huber_loss(a, jnp.zeros(()))


@program("TT", together(logits=normal(2, 5, 4), labels=integers(1, 4, 2, 3)))
@third_party
def optax_ctc_loss(batch: Any) -> Any:
    def loss(logits: Array) -> Array:
        return optax.ctc_loss(logits, jnp.zeros((2, 5)), batch["labels"], jnp.zeros((2, 3))).mean()

    return jax.value_and_grad(loss)(batch["logits"])


# --- updates --------------------------------------------------------------------------------------------


def _quadratic(w: Any, x: Array) -> Array:
    return jnp.square(x @ w["a"] - w["b"]).mean()


def _parameters() -> tuple[Any, ...]:
    a, b = weights((3, 2), (2,))()
    return ({"a": a, "b": b},)


def _updates_by(tx: Callable[[], Any], steps: int = 2) -> Callable[..., Any]:
    """The step that follows reduced gradients, and its reference."""

    def step(x: Array, w: Any) -> Any:
        state = tx().init(w)
        for _ in range(steps):
            gradients = replicax.get_replica_context().all_reduce("mean", jax.grad(_quadratic)(w, x))
            updates, state = tx().update(gradients, state, w)
            w = optax.apply_updates(w, updates)
        return w, state

    return third_party(step)


def _updates_of_all(tx: Callable[[], Any], steps: int = 2) -> Callable[..., list[Any]]:
    @jax.jit
    @third_party
    def train(xs: list[Any], w: Any) -> Any:
        state = tx().init(w)
        for _ in range(steps):
            gradients = [jax.grad(_quadratic)(w, x) for x in xs]
            updates, state = tx().update(jax.tree.map(lambda *g: sum(g) / len(xs), *gradients), state, w)
            w = optax.apply_updates(w, updates)
        return w, state

    return lambda xs, w: [train(xs, w)] * len(xs)


def _updates(name: str, localities: str, tx: Callable[[], Any], steps: int = 2) -> None:
    step = _updates_by(tx, steps)
    step.__name__ = name
    program(localities, normal(4, 3), shared=_parameters, across=_updates_of_all(tx, steps))(step)


_updates("optax_adam_of_reduced_gradients", "M" * 7, lambda: optax.adam(0.1))
_updates(
    "optax_chain_of_reduced_gradients",
    "M" * 8,
    lambda: optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.scale_by_adam(),
        optax.add_decayed_weights(0.01),
        optax.scale_by_schedule(optax.warmup_cosine_decay_schedule(0.1, -1.0, 2, 5)),
    ),
    steps=1,
)
_updates(
    "optax_steps_of_several_reduced_gradients",
    "M" * 8,
    lambda: optax.MultiSteps(optax.sgd(0.1, momentum=0.9), every_k_schedule=2),
)


@program("TTTTTTM", normal(4, 3), shared=_parameters)
@third_party
def optax_adam_of_each_replicas_gradients(x: Array, w: Any) -> Any:
    # Every replica goes its own way; only the count of steps is the same.
    tx = optax.adam(0.1)
    updates, state = tx.update(jax.grad(_quadratic)(w, x), tx.init(w), w)
    return optax.apply_updates(w, updates), state[0].mu, state[0].nu, state[0].count


@program("TTTTM", normal(4, 3), shared=_parameters)
@third_party
def optax_norms_clipping_and_averages(x: Array, w: Any) -> Any:
    gradients = jax.grad(_quadratic)(w, x)
    clipped, _ = optax.clip(0.1).update(gradients, optax.EmptyState())
    average = optax.incremental_update(clipped, w, 0.5)
    schedule = optax.exponential_decay(0.1, 10, 0.5)
    return optax.tree.norm(gradients), average, optax.projections.projection_simplex(x[0]), schedule(jnp.int32(7))


@program("TTTM", normal(4, 3), shared=_parameters)
@third_party
def optax_inside_a_training_loop(x: Array, w: Any) -> Any:
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.1, 0.01, 5))

    def body(carry: Any, _: None) -> Any:
        w, state = carry
        loss, gradients = jax.value_and_grad(_quadratic)(w, x)
        updates, state = tx.update(gradients, state, w)
        return (optax.apply_updates(w, updates), state), loss

    (w, state), losses = lax.scan(body, (w, tx.init(w)), length=4)
    return w, losses, state.hyperparams["learning_rate"]


# --- Equinox --------------------------------------------------------------------------------------------


def _equinox_model() -> tuple[Any, ...]:
    import equinox as eqx

    with jax.numpy_dtype_promotion("standard"):
        model = eqx.nn.MLP(3, 2, width_size=4, depth=1, key=jax.random.key(0))
    return (eqx.filter(model, eqx.is_array),)


@program("TTTTTM", normal(4, 3), shared=_equinox_model)
@third_party
def equinox_filtered_gradients(x: Array, arrays: Any) -> Any:
    import equinox as eqx

    template = eqx.filter_eval_shape(lambda key: eqx.nn.MLP(3, 2, width_size=4, depth=1, key=key), jax.random.key(0))
    model = eqx.combine(arrays, eqx.filter(template, lambda leaf: not isinstance(leaf, jax.ShapeDtypeStruct)))

    @eqx.filter_value_and_grad
    def loss(model: Any) -> Array:
        return jnp.square(jax.vmap(eqx.filter_checkpoint(model))(x)).mean()

    return *loss(model), eqx.filter_jit(model)(jnp.ones(3))
