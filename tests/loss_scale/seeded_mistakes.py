"""Steps that train wrongly on several replicas, and rightly on one. The line that is wrong says so.

Each is told by the part of the warning that it is to raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import replicax
from tests.loss_scale.training_steps import (
    REPLICAS,
    Model,
    clipped_back,
    here,
    mean_squared,
    mean_with_rule,
    share_of,
    softened,
)

MISTAKES: list[tuple[Callable[[Model, Any], None], str]] = []

MEAN = "a mean over one replica's own examples"
REPEATED = "the same on every replica"
DOUBLE_SCALED = "divided by the number of replicas once more"
SUMMED_TWICE = "what they have added up already"
NONLINEAR = "not linear"
CLIPPED = "before that is summed"


def mistake(told: str) -> Callable[[Callable[[Model, Any], None]], None]:
    def add(step: Callable[[Model, Any], None]) -> None:
        MISTAKES.append((step, told))

    return add


# --- a mean over the replica's own examples -----------------------------------------------------------------


@mistake(MEAN)
def mean(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.mean(m.errors(batch)))  # wrong


@mistake(MEAN)
def mean_of_optax_losses(m: Model, batch: Any) -> None:
    m.train(lambda: optax.l2_loss(m.predicted(batch), batch["y"]).mean())  # wrong


@mistake(MEAN)
def weighted_mean_of_losses(m: Model, batch: Any) -> None:
    m.train(lambda: 0.5 * jnp.mean(m.errors(batch)))  # wrong


@mistake(MEAN)
def sum_by_the_size_of_the_slice(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.sum(m.errors(batch)) / batch["x"].shape[0])  # wrong


@mistake(MEAN)
def half_the_sum_by_the_size_of_the_slice(m: Model, batch: Any) -> None:
    m.train(lambda: 0.5 * jnp.sum(m.errors(batch)) / batch["x"].shape[0])  # wrong


@mistake(MEAN)
def each_loss_by_the_size_of_the_slice(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.sum(m.errors(batch) / m.examples))  # wrong


@mistake(MEAN)
def mean_over_tokens(m: Model, batch: Any) -> None:
    m.train(lambda: m.token_losses(batch).mean())  # wrong


@mistake(MEAN)
def mean_over_tokens_then_examples(m: Model, batch: Any) -> None:
    m.train(lambda: m.token_losses(batch).mean(-1).mean())  # wrong


@mistake(MEAN)
def mean_over_examples_then_tokens(m: Model, batch: Any) -> None:
    m.train(lambda: m.token_losses(batch).mean(0).mean())  # wrong


@mistake(MEAN)
def sum_over_tokens_mean_over_examples(m: Model, batch: Any) -> None:
    m.train(lambda: m.token_losses(batch).sum() / m.examples)  # wrong


@mistake(MEAN)
def masked_mean(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.sum(m.token_losses(batch) * batch["mask"]) / jnp.sum(batch["mask"]))  # wrong


@mistake(MEAN)
def masked_mean_with_a_guard(m: Model, batch: Any) -> None:
    def loss() -> Any:
        count = jnp.maximum(jnp.sum(batch["mask"]), 1.0)
        return jnp.sum(m.token_losses(batch) * batch["mask"]) / count  # wrong

    m.train(loss)


@mistake(MEAN)
def masked_mean_with_a_guarded_number(m: Model, batch: Any) -> None:
    def loss() -> Any:
        kept = batch["mask"] > 0
        return jnp.sum(m.token_losses(batch) * kept) / jnp.maximum(jnp.sum(kept), 1)  # wrong

    m.train(loss)


@mistake(MEAN)
def mean_where(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.mean(m.token_losses(batch), where=batch["mask"] > 0))  # wrong


@mistake(MEAN)
def average_with_weights(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.average(m.errors(batch), weights=jnp.abs(batch["y"])))  # wrong


@mistake(MEAN)
def root_of_the_mean(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.sqrt(jnp.mean(m.errors(batch))))  # wrong


@mistake(MEAN)
def mean_of_what_vmap_gives(m: Model, batch: Any) -> None:
    def one(x: Any, y: Any) -> Any:
        return softened(jnp.dot(x, m.w.value) - y)

    m.train(lambda: jnp.mean(jax.vmap(one)(batch["x"], batch["y"])))  # wrong


@mistake(MEAN)
def mean_of_what_map_gives(m: Model, batch: Any) -> None:
    def one(pair: Any) -> Any:
        return (jnp.dot(pair[0], m.w.value) - pair[1]) ** 2

    m.train(lambda: jnp.mean(jax.lax.map(one, (batch["x"], batch["y"]))))  # wrong


@mistake(MEAN)
def mean_of_means(m: Model, batch: Any) -> None:
    def loss() -> Any:
        halves = jnp.split(m.errors(batch), 2)
        return jnp.mean(jnp.stack([jnp.mean(half) for half in halves]))  # wrong

    m.train(loss)


@mistake(MEAN)
def means_of_small_batches_in_a_scan(m: Model, batch: Any) -> None:
    def turn(total: Any, part: Any) -> Any:
        losses = (part[0] @ m.w.value - part[1]) ** 2
        return total + jnp.mean(losses), None  # wrong

    def loss() -> Any:
        parts = batch["x"].reshape(2, m.examples // 2, 3), batch["y"].reshape(2, m.examples // 2)
        return jax.lax.scan(turn, jnp.float32(0), parts)[0] / 2

    m.train(loss)


@mistake(MEAN)
def gradients_of_small_batches_in_a_scan(m: Model, batch: Any) -> None:
    def turn(total: Any, part: Any) -> Any:
        x, y = part
        _, [gradient] = replicax.value_and_grad(lambda: jnp.mean((x @ m.w.value - y) ** 2), [m.w])()  # wrong
        return total + gradient, None

    parts = batch["x"].reshape(2, m.examples // 2, 3), batch["y"].reshape(2, m.examples // 2)
    total, _ = jax.lax.scan(turn, jnp.zeros(3), parts)
    m.w.assign_sub(0.1 * here().all_reduce("sum", total / 2))


@mistake(MEAN)
def mean_in_a_helper_that_is_jitted(m: Model, batch: Any) -> None:
    m.train(lambda: mean_squared(m.predicted(batch), batch["y"]))  # wrong


@mistake(MEAN)
def mean_with_a_rule_of_its_own(m: Model, batch: Any) -> None:
    m.train(lambda: mean_with_rule(m.errors(batch)))  # wrong


@mistake(MEAN)
def mean_behind_a_rule(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.mean(softened(clipped_back(m.predicted(batch)) - batch["y"])))  # wrong


@mistake(MEAN)
def mean_inside_of_a_checkpoint(m: Model, batch: Any) -> None:
    def loss(w: Any) -> Any:
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)  # wrong

    m.train(lambda: jax.checkpoint(loss)(m.w.value))


@mistake(MEAN)
def mean_beside_a_share(m: Model, batch: Any) -> None:
    def loss() -> Any:
        divergence = jnp.mean(jnp.square(m.hidden(batch["x"])).sum(-1))  # wrong
        return share_of(m.errors(batch)) + 0.1 * divergence

    m.train(loss)


@mistake(MEAN)
def mean_and_a_penalty(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.mean(m.errors(batch)) + 0.01 * m.penalty())  # wrong


@mistake(MEAN)
def mean_with_aux(m: Model, batch: Any) -> None:
    def loss() -> Any:
        errors = m.errors(batch)
        return errors.mean(), errors  # wrong

    _, gradients = replicax.value_and_grad(loss, m.variables, has_aux=True)()
    m.apply(gradients)


@mistake(MEAN)
def mean_summed_by_hand(m: Model, batch: Any) -> None:
    _, [gradient] = replicax.value_and_grad(lambda: jnp.mean(m.errors(batch)), [m.w])()  # wrong
    m.w.assign_sub(0.1 * here().all_reduce("sum", gradient))


@mistake(MEAN)
def learning_rate_that_is_one_by_the_number_of_replicas(m: Model, batch: Any) -> None:
    _, [gradient] = replicax.value_and_grad(lambda: jnp.mean(m.errors(batch)), [m.w])()  # wrong
    m.w.assign_add(-1 / REPLICAS * here().all_reduce("sum", gradient))


@mistake(MEAN)
def mean_summed_by_jax(m: Model, batch: Any) -> None:
    _, [gradient] = replicax.value_and_grad(lambda: jnp.mean(m.errors(batch)), [m.w])()  # wrong
    m.w.assign_sub(0.1 * jax.lax.psum(gradient, replicax.REPLICA_AXIS))


@mistake(MEAN)
def mean_and_adam(m: Model, batch: Any) -> None:
    _, gradients = replicax.value_and_grad(lambda: jnp.mean(m.errors(batch)), [m.w, m.b])()  # wrong
    m.adam.apply_gradients(gradients, [m.w, m.b])


@mistake(MEAN)
def mean_of_one_of_two_branches(m: Model, batch: Any) -> None:
    def loss() -> Any:
        return jax.lax.cond(
            m.rate.value > 0.5,
            lambda: share_of(m.errors(batch)),
            lambda: jnp.mean(jnp.abs(m.predicted(batch) - batch["y"])),  # wrong
        )

    m.train(loss)


@mistake(MEAN)
def contrast_within_the_slice(m: Model, batch: Any) -> None:
    def loss() -> Any:
        hidden = m.hidden(batch["x"])
        scores = jax.nn.log_softmax(hidden @ batch["x"].T, axis=-1)
        return -jnp.mean(jnp.diagonal(scores))  # wrong

    m.train(loss)


@mistake(MEAN)
def variance_of_the_slice(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.var(m.predicted(batch)))  # wrong


# --- what is the same on every replica ------------------------------------------------------------------------


@mistake(REPEATED)
def penalty(m: Model, batch: Any) -> None:
    m.train(lambda: share_of(m.errors(batch)) + 0.01 * m.penalty())  # wrong


@mistake(REPEATED)
def penalty_by_optax(m: Model, batch: Any) -> None:
    def loss() -> Any:
        size = optax.tree.norm([v.value for v in m.variables])
        return share_of(m.errors(batch)) + 1e-4 * size  # wrong

    m.train(loss)


@mistake(REPEATED)
def penalty_added_up_in_a_scan(m: Model, batch: Any) -> None:
    def loss() -> Any:
        total, _ = jax.lax.scan(lambda c, layer: (c + jnp.sum(jnp.abs(layer)), None), 0.0, m.stack.value)
        return share_of(m.errors(batch)) + 1e-4 * total  # wrong

    m.train(loss)


@mistake(REPEATED)
def penalty_with_a_rule_of_its_own(m: Model, batch: Any) -> None:
    m.train(lambda: 2.0 * (share_of(m.errors(batch)) + clipped_back(0.01 * m.penalty())))  # wrong


@mistake(REPEATED)
def penalty_beside_a_share_by_hand(m: Model, batch: Any) -> None:
    def loss() -> Any:
        return jnp.sum(m.errors(batch)) / (REPLICAS * m.examples) + 0.01 * m.penalty()  # wrong

    m.train(loss)


@mistake(REPEATED)
def balance_of_all_replicas(m: Model, batch: Any) -> None:
    def loss() -> Any:
        used = here().all_reduce("mean", jax.nn.softmax(m.hidden(batch["x"])).mean(0))
        return share_of(m.errors(batch)) + 0.1 * jnp.sum(used**2)  # wrong

    m.train(loss)


@mistake(REPEATED)
def decay_in_the_gradient(m: Model, batch: Any) -> None:
    gradients = m.gradients(lambda: share_of(m.errors(batch)))
    m.apply([g + 0.01 * v.value for g, v in zip(gradients, m.variables, strict=True)])  # wrong


# --- twice --------------------------------------------------------------------------------------------------


@mistake(DOUBLE_SCALED)
def share_by_the_number_of_replicas(m: Model, batch: Any) -> None:
    m.train(lambda: share_of(m.errors(batch)) / here().num_replicas_in_sync)  # wrong


@mistake(DOUBLE_SCALED)
def share_by_the_number_of_the_strategy(m: Model, batch: Any) -> None:
    m.train(lambda: 0.3 * share_of(m.errors(batch)) / m.strategy.num_replicas_in_sync)  # wrong


@mistake(DOUBLE_SCALED)
def shares_averaged(m: Model, batch: Any) -> None:
    m.apply(m.averaged(lambda: share_of(m.errors(batch))), aggregate=False)  # wrong


@mistake(DOUBLE_SCALED)
def shares_averaged_by_jax(m: Model, batch: Any) -> None:
    _, [gradient] = replicax.value_and_grad(lambda: share_of(m.errors(batch)), [m.w])()  # wrong
    m.w.assign_sub(0.1 * jax.lax.pmean(gradient, replicax.REPLICA_AXIS))


@mistake(DOUBLE_SCALED)
def penalty_scaled_twice(m: Model, batch: Any) -> None:
    def loss() -> Any:
        mine = 0.01 * m.penalty() / here().num_replicas_in_sync
        return share_of(m.errors(batch)) + replicax.scale_regularization_loss(mine)  # wrong

    m.train(loss)


@mistake(DOUBLE_SCALED)
def share_taken_for_a_penalty(m: Model, batch: Any) -> None:
    m.train(lambda: replicax.scale_regularization_loss(share_of(m.errors(batch))))  # wrong


# --- what is summed twice ---------------------------------------------------------------------------------------


@mistake(SUMMED_TWICE)
def sum_of_the_sum(m: Model, batch: Any) -> None:
    totals = m.summed(lambda: share_of(m.errors(batch)))
    m.apply(here().all_reduce("sum", totals), aggregate=False)  # wrong


@mistake(SUMMED_TWICE)
def sum_of_the_mean_by_jax(m: Model, batch: Any) -> None:
    [gradient, *_] = m.averaged(lambda: jnp.mean(m.errors(batch)))
    m.w.assign_sub(0.1 * jax.lax.psum(gradient, replicax.REPLICA_AXIS))  # wrong


@mistake(SUMMED_TWICE)
def sum_of_what_has_been_clipped(m: Model, batch: Any) -> None:
    totals = m.summed(lambda: share_of(m.errors(batch)))
    clipped, _ = optax.clip_by_global_norm(1.0).update(list(totals), optax.EmptyState())
    m.apply(here().all_reduce("sum", clipped), aggregate=False)  # wrong


# --- functions of shares ---------------------------------------------------------------------------------------


@mistake(NONLINEAR)
def root_of_a_share(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.sqrt(share_of(m.errors(batch))))  # wrong


@mistake(NONLINEAR)
def square_of_a_share(m: Model, batch: Any) -> None:
    def loss() -> Any:
        mine = share_of(m.errors(batch))
        return mine * mine  # wrong

    m.train(loss)


@mistake(NONLINEAR)
def flooded_share(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.abs(share_of(m.errors(batch)) - 0.1) + 0.1)  # wrong


# --- clipping before the sum ------------------------------------------------------------------------------------


@mistake(CLIPPED)
def clipped_by_norm(m: Model, batch: Any) -> None:
    gradients = m.gradients(lambda: share_of(m.errors(batch)))
    clip = optax.clip_by_global_norm(1.0)
    m.apply(clip.update(gradients, clip.init(gradients))[0])  # wrong


@mistake(CLIPPED)
def clipped_by_norm_by_hand(m: Model, batch: Any) -> None:
    gradients = m.gradients(lambda: jnp.sum(m.errors(batch)) / 100.0)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))
    m.apply([g * jnp.minimum(1.0, 1.0 / norm) for g in gradients])  # wrong


@mistake(CLIPPED)
def clipped_by_value(m: Model, batch: Any) -> None:
    m.apply([jnp.clip(g, -1.0, 1.0) for g in m.gradients(lambda: share_of(m.errors(batch)))])  # wrong


@mistake(CLIPPED)
def normalized(m: Model, batch: Any) -> None:
    gradients = m.gradients(lambda: share_of(m.errors(batch)))
    m.apply([g / (jnp.linalg.norm(g) + 1e-6) for g in gradients])  # wrong


@mistake(CLIPPED)
def clipped_before_a_mean(m: Model, batch: Any) -> None:
    gradients = m.gradients(lambda: jnp.mean(m.errors(batch)))
    norm = optax.tree.norm(gradients)
    smaller = [g * (1.0 / jnp.maximum(norm, 1.0)) for g in gradients]  # wrong
    m.apply(here().all_reduce("mean", smaller), aggregate=False)
