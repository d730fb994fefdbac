"""Steps that train rightly on several replicas: nothing is told of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import replicax
from tests.loss_scale.training_steps import REPLICAS, Model, clipped_back, here, share_of, softened

RIGHT: list[Callable[[Model, Any], Any]] = []


def right(step: Callable[[Model, Any], Any]) -> Callable[[Model, Any], Any]:
    RIGHT.append(step)
    return step


# --- shares ---------------------------------------------------------------------------------------------------


@right
def share(m: Model, batch: Any) -> None:
    m.train(lambda: share_of(m.errors(batch)))


@right
def share_with_weights(m: Model, batch: Any) -> None:
    m.train(lambda: share_of(m.errors(batch), sample_weight=jnp.abs(batch["y"]), global_batch_size=m.whole))


@right
def share_of_means_over_tokens(m: Model, batch: Any) -> None:
    m.train(lambda: share_of(m.token_losses(batch).mean(-1)))


@right
def share_of_masked_means_over_tokens(m: Model, batch: Any) -> None:
    def loss() -> Any:
        count = jnp.maximum(batch["mask"].sum(-1), 1.0)
        return share_of((m.token_losses(batch) * batch["mask"]).sum(-1) / count)

    m.train(loss)


@right
def share_and_a_share_of_a_penalty(m: Model, batch: Any) -> None:
    m.train(lambda: share_of(m.errors(batch)) + replicax.scale_regularization_loss(0.01 * m.penalty()))


@right
def share_by_a_weight_that_is_one_by_the_replicas(m: Model, batch: Any) -> None:
    m.train(lambda: share_of(m.errors(batch)) + share_of(m.token_losses(batch), reduce_dims="sum") / REPLICAS)


@right
def share_and_a_constant(m: Model, batch: Any) -> None:
    m.train(lambda: 1e-8 - 3.0 * share_of(-m.errors(batch)) + m.rate.value * 0.5)


@right
def share_by_what_is_trained(m: Model, batch: Any) -> None:
    def loss() -> Any:
        spread = softened(m.b.value)
        return share_of(m.errors(batch)) / spread + replicax.scale_regularization_loss(jnp.log(spread))

    m.train(loss)


@right
def share_under_a_loss_scale(m: Model, batch: Any) -> None:
    gradients = m.gradients(lambda: 1024.0 * m.rate.value * share_of(m.errors(batch)))
    m.apply([g / (1024.0 * m.rate.value) for g in gradients])


@right
def share_if_it_is_finite(m: Model, batch: Any) -> None:
    gradients = m.gradients(lambda: share_of(m.errors(batch)))
    finite = jnp.stack([jnp.isfinite(g).all() for g in gradients]).all()
    m.apply([jnp.where(finite, g, 0.0) for g in gradients])


@right
def share_behind_layer_norm(m: Model, batch: Any) -> None:
    def loss() -> Any:
        h = m.hidden(batch["x"])
        h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-6)
        return share_of((h @ m.w.value - batch["y"]) ** 2)

    m.train(loss)


@right
def share_behind_batch_norm_of_the_slice(m: Model, batch: Any) -> None:
    def loss() -> Any:
        h = m.hidden(batch["x"])
        h = (h - h.mean(0)) * jax.lax.rsqrt(h.var(0) + 1e-6) * m.w.value + m.b.value
        return share_of(h.sum(-1) - batch["y"])

    m.train(loss)


@right
def share_behind_batch_norm_of_all(m: Model, batch: Any) -> None:
    def loss() -> Any:
        h = m.hidden(batch["x"])
        mean = here().all_reduce("mean", h.mean(0))
        spread = here().all_reduce("mean", ((h - mean) ** 2).mean(0))
        return share_of((((h - mean) / jnp.sqrt(spread + 1e-6)) @ m.w.value - batch["y"]) ** 2)

    m.train(loss)


@right
def share_through_rules_and_loops(m: Model, batch: Any) -> None:
    def loss() -> Any:
        h = jax.checkpoint(m.hidden)(batch["x"])
        return clipped_back(share_of(softened(clipped_back(h @ m.w.value - batch["y"]))))

    m.train(loss)


@right
def share_in_branches(m: Model, batch: Any) -> None:
    def loss() -> Any:
        errors = m.errors(batch)
        return jax.lax.cond(m.rate.value > 0.5, lambda: share_of(errors), lambda: 2.0 * share_of(jnp.abs(errors)))

    m.train(loss)


@right
def shares_of_several_tasks(m: Model, batch: Any) -> None:
    def loss() -> Any:
        weights = jax.nn.softmax(m.w.value)
        tasks = [
            share_of(m.errors(batch)),
            share_of(m.token_losses(batch), reduce_dims="sum"),
            share_of(jnp.abs(m.predicted(batch))),
        ]
        return jnp.dot(jnp.stack(tasks), weights)

    m.train(loss)


def gradient_in_parts(m: Model, batch: Any, loss: Callable[[Any], Any], count: int) -> Any:
    """The mean of the gradients of so many parts of a replica's examples, one after the other in a scan."""

    def turn(total: Any, part: Any) -> Any:
        x, y = part
        _, [gradient] = replicax.value_and_grad(lambda: loss((x @ m.w.value - y) ** 2), [m.w])()
        return total + gradient, None

    parts = batch["x"].reshape(count, m.examples // count, 3), batch["y"].reshape(count, m.examples // count)
    return jax.lax.scan(turn, jnp.zeros(3), parts)[0] / count


@right
def shares_added_up_in_a_scan(m: Model, batch: Any) -> None:
    m.w.assign_sub(0.1 * here().all_reduce("sum", gradient_in_parts(m, batch, share_of, 4)))


@right
def shares_of_as_many_parts_as_replicas(m: Model, batch: Any) -> None:
    def share_of_part(losses: Any) -> Any:
        return share_of(losses, global_batch_size=here().num_replicas_in_sync * losses.shape[0])

    m.w.assign_sub(0.1 * here().all_reduce("sum", gradient_in_parts(m, batch, share_of_part, REPLICAS)))


@right
def share_of_a_divergence(m: Model, batch: Any) -> None:
    def loss() -> Any:
        h = m.hidden(batch["x"])
        return share_of(m.errors(batch)) + 0.1 * share_of(0.5 * jnp.sum(h**2 + jnp.exp(h) - h - 1.0, axis=-1))

    m.train(loss)


@right
def share_of_a_contrast_with_all(m: Model, batch: Any) -> None:
    def loss() -> Any:
        h = m.hidden(batch["x"])
        everyone = here().all_gather(h, axis=0)
        scores = jax.nn.log_softmax(h @ everyone.T, axis=-1)
        return share_of(-scores[:, 0])

    m.train(loss)


@right
def share_of_a_balance_of_all_replicas(m: Model, batch: Any) -> None:
    def loss() -> Any:
        used = here().all_reduce("mean", jax.nn.softmax(m.hidden(batch["x"])).mean(0))
        return share_of(m.errors(batch)) + replicax.scale_regularization_loss(0.1 * jnp.sum(used**2))

    m.train(loss)


@right
def share_with_a_baseline(m: Model, batch: Any) -> None:
    def loss() -> Any:
        rewards = jax.lax.stop_gradient(m.errors(batch))
        return share_of((rewards - rewards.mean()) * jax.nn.log_sigmoid(m.predicted(batch)))

    m.train(loss)


@right
def share_after_a_step_of_its_own(m: Model, batch: Any) -> None:
    def loss() -> Any:
        inner = jax.grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))
        return share_of((batch["x"] @ (m.w.value - 0.1 * inner(m.w.value)) - batch["y"]) ** 2)

    m.train(loss)


@right
def share_with_accuracy_beside_it(m: Model, batch: Any) -> Any:
    def loss() -> Any:
        errors = m.errors(batch)
        return share_of(errors), {"error": errors.mean(), "large": jnp.mean(errors > 1.0)}

    (value, aux), gradients = replicax.value_and_grad(loss, m.variables, has_aux=True)()
    m.apply(gradients)
    return here().all_reduce("sum", value), here().all_reduce("mean", aux)


@right
def two_networks_with_two_losses(m: Model, batch: Any) -> None:
    _, [of_w] = replicax.value_and_grad(lambda: share_of(m.errors(batch)), [m.w])()
    m.w.assign_sub(0.1 * here().all_reduce("sum", of_w))
    _, [of_b] = replicax.value_and_grad(lambda: share_of(softened(m.errors(batch))), [m.b])()
    m.b.assign_sub(0.1 * here().all_reduce("sum", of_b))


# --- scaled by hand -------------------------------------------------------------------------------------------


@right
def sum_by_the_whole_batch(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.sum(m.errors(batch)) / m.whole)


@right
def sum_over_tokens_by_the_whole_batch(m: Model, batch: Any) -> None:
    m.train(lambda: m.token_losses(batch).sum() / (m.whole * 6))


@right
def half_the_sum_by_the_whole_batch(m: Model, batch: Any) -> None:
    m.train(lambda: 0.5 * jnp.sum(m.errors(batch)) / m.whole)


@right
def masked_sum_by_the_count_of_all(m: Model, batch: Any) -> None:
    def loss() -> Any:
        count = here().all_reduce("sum", batch["mask"].sum())
        return jnp.sum(m.token_losses(batch) * batch["mask"]) / count

    m.train(loss)


@right
def masked_mean_by_its_part_of_all(m: Model, batch: Any) -> None:
    def loss() -> Any:
        mine = batch["mask"].sum()
        mean = jnp.sum(m.token_losses(batch) * batch["mask"]) / mine
        return mean * (mine / here().all_reduce("sum", mine))

    m.train(loss)


@right
def mean_by_the_replicas(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.mean(m.errors(batch)) / here().num_replicas_in_sync)


@right
def mean_by_the_replicas_of_the_strategy(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.mean(m.errors(batch)) * (0.3 / m.strategy.num_replicas_in_sync))


@right
def mean_by_a_number_from_elsewhere(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.mean(m.errors(batch)) / REPLICAS)


@right
def mean_by_the_size_of_the_axis(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.mean(m.errors(batch)) / jax.lax.psum(1, replicax.REPLICA_AXIS))


@right
def mean_of_losses_by_the_replicas(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.mean(m.errors(batch) / REPLICAS))


@right
def mean_by_its_part_of_the_batch(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.mean(m.errors(batch)) * m.examples / m.whole)


@right
def mean_taken_for_a_penalty(m: Model, batch: Any) -> None:
    m.train(lambda: replicax.scale_regularization_loss(jnp.mean(m.errors(batch))))


@right
def mean_and_penalty_by_the_replicas(m: Model, batch: Any) -> None:
    m.train(lambda: (jnp.mean(m.errors(batch)) + 0.01 * m.penalty()) / REPLICAS)


@right
def share_and_a_penalty_by_the_replicas(m: Model, batch: Any) -> None:
    m.train(lambda: share_of(m.errors(batch)) + 0.01 * m.penalty() / REPLICAS)


@right
def share_and_a_penalty_with_a_smaller_factor(m: Model, batch: Any) -> None:
    m.train(lambda: share_of(m.errors(batch)) + (0.01 / here().num_replicas_in_sync) * m.penalty())


@right
def sum_as_it_is(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.sum(m.errors(batch)))


@right
def sum_over_examples_mean_over_features(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.mean(jnp.sum(m.hidden(batch["x"]) ** 2, axis=0)))


@right
def sum_of_the_hardest_by_the_whole_batch(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.sum(jax.lax.top_k(m.errors(batch), 4)[0]) / (4 * REPLICAS))


@right
def sums_in_a_scan_by_the_whole_batch(m: Model, batch: Any) -> None:
    def turn(total: Any, part: Any) -> Any:
        return total + jnp.sum((part[0] @ m.w.value - part[1]) ** 2), None

    def loss() -> Any:
        parts = batch["x"].reshape(2, m.examples // 2, 3), batch["y"].reshape(2, m.examples // 2)
        return jax.lax.scan(turn, jnp.float32(0), parts)[0] / m.whole

    m.train(loss)


@right
def sum_by_the_replicas(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.sum(m.errors(batch)) / here().num_replicas_in_sync)


@right
def mean_that_is_meant(m: Model, batch: Any) -> None:
    m.train(lambda: replicax.as_share(jnp.mean(m.errors(batch))))


@right
def penalty_that_is_meant(m: Model, batch: Any) -> None:
    m.train(lambda: share_of(m.errors(batch)) + replicax.as_share(0.01 * m.penalty()))


@right
def root_that_is_meant(m: Model, batch: Any) -> None:
    m.train(lambda: replicax.as_share(jnp.sqrt(share_of(m.errors(batch)))))


@right
def smaller_rate(m: Model, batch: Any) -> None:
    _, [gradient] = replicax.value_and_grad(lambda: jnp.mean(m.errors(batch)), [m.w])()
    m.w.assign_sub(0.1 / here().num_replicas_in_sync * here().all_reduce("sum", gradient))


# --- what becomes of the gradients ------------------------------------------------------------------------------


@right
def means_averaged(m: Model, batch: Any) -> None:
    m.apply(m.averaged(lambda: jnp.mean(m.errors(batch))), aggregate=False)


@right
def sums_averaged(m: Model, batch: Any) -> None:
    m.apply(m.averaged(lambda: jnp.sum(m.errors(batch))), aggregate=False)


@right
def sums_averaged_by_jax(m: Model, batch: Any) -> None:
    _, [gradient] = replicax.value_and_grad(lambda: jnp.sum(m.errors(batch)), [m.w])()
    m.w.assign_sub(0.1 * jax.lax.pmean(gradient, replicax.REPLICA_AXIS))


@right
def sums_divided_by_a_number_from_elsewhere(m: Model, batch: Any) -> None:
    m.apply([t / REPLICAS for t in m.summed(lambda: jnp.sum(m.errors(batch)))], aggregate=False)


@right
def means_and_penalties_averaged(m: Model, batch: Any) -> None:
    m.apply(m.averaged(lambda: jnp.mean(m.errors(batch)) + 0.01 * m.penalty()), aggregate=False)


@right
def means_averaged_by_jax(m: Model, batch: Any) -> None:
    _, [gradient] = replicax.value_and_grad(lambda: jnp.mean(m.errors(batch)), [m.w])()
    m.w.assign_sub(0.1 * jax.lax.pmean(gradient, replicax.REPLICA_AXIS))


@right
def means_summed_and_divided(m: Model, batch: Any) -> None:
    totals = m.summed(lambda: jnp.mean(m.errors(batch)))
    m.apply([t / REPLICAS for t in totals], aggregate=False)


@right
def means_that_stay_where_they_are(m: Model, batch: Any) -> Any:
    return replicax.value_and_grad(lambda: jnp.mean(m.errors(batch)), m.variables)()


@right
def means_added_up_in_a_scan_and_averaged(m: Model, batch: Any) -> None:
    m.w.assign_sub(0.1 * here().all_reduce("mean", gradient_in_parts(m, batch, jnp.mean, 2)))


@right
def clipped_after_the_sum(m: Model, batch: Any) -> None:
    totals = m.summed(lambda: share_of(m.errors(batch)))
    clip = optax.clip_by_global_norm(1.0)
    m.apply(clip.update(totals, clip.init(totals))[0], aggregate=False)


@right
def clipped_by_the_norm_of_the_sum(m: Model, batch: Any) -> None:
    _, gradients = replicax.value_and_grad(lambda: share_of(m.errors(batch)), [m.w, m.b])()
    norm = optax.tree.norm(here().all_reduce("sum", gradients))
    m.adam.apply_gradients([g * jnp.minimum(1.0, 1.0 / norm) for g in gradients], [m.w, m.b])


@right
def decay_after_the_sum(m: Model, batch: Any) -> None:
    totals = m.summed(lambda: share_of(m.errors(batch)))
    m.apply([t + 0.01 * v.value for t, v in zip(totals, m.variables, strict=True)], aggregate=False)


@right
def noise_of_the_gradient(m: Model, batch: Any) -> Any:
    gradients = m.gradients(lambda: share_of(m.errors(batch)))
    m.apply(gradients)
    return here().all_reduce("mean", optax.tree.norm(gradients, squared=True))


@right
def votes_of_the_replicas(m: Model, batch: Any) -> None:
    gradients = m.gradients(lambda: jnp.mean(m.errors(batch)))
    votes = here().all_reduce("sum", [jnp.sign(g) for g in gradients])
    m.apply([jnp.sign(v) for v in votes], aggregate=False)


@right
def averages_of_parameters(m: Model, batch: Any) -> None:
    _, [gradient] = replicax.value_and_grad(lambda: share_of(m.errors(batch)), [m.w])()
    m.w.assign(here().all_reduce("mean", m.w.value - 0.1 * gradient))


@right
def averages_of_what_is_the_same(m: Model, batch: Any) -> None:
    total, *_ = m.summed(lambda: share_of(m.errors(batch)))
    m.w.assign(here().all_reduce("mean", m.w.value - 0.1 * total))


@right
def mean_of_the_mean(m: Model, batch: Any) -> None:
    means = m.averaged(lambda: jnp.mean(m.errors(batch)))
    m.apply(here().all_reduce("mean", means), aggregate=False)


@right
def sum_over_the_number_of_replicas(m: Model, batch: Any) -> None:
    totals = m.summed(lambda: share_of(m.errors(batch)))
    again = here().all_reduce("sum", totals)
    m.apply([g / here().num_replicas_in_sync for g in again], aggregate=False)


@right
def share_averaged_and_summed(m: Model, batch: Any) -> None:
    means = m.averaged(lambda: share_of(m.errors(batch)))
    m.apply(here().all_reduce("sum", means), aggregate=False)


@right
def sum_of_two_steps(m: Model, batch: Any) -> None:
    for _ in range(2):
        gradient, *_ = m.gradients(lambda: share_of(m.errors(batch)))
        m.w.assign_sub(0.1 * here().all_reduce("sum", gradient))


@right
def smoothed_gradient(m: Model, batch: Any) -> None:
    _, [gradient] = replicax.value_and_grad(lambda: share_of(m.errors(batch)), [m.w])()
    total = here().all_reduce("sum", gradient)
    m.w.assign_sub(m.rate.value * total / (1e-6 + jnp.abs(total)))


@right
def in_half_precision(m: Model, batch: Any) -> None:
    def loss() -> Any:
        errors = batch["x"].astype(jnp.bfloat16) @ m.w.value.astype(jnp.bfloat16) - batch["y"].astype(jnp.bfloat16)
        return share_of(errors**2).astype(jnp.float32)

    m.train(loss)


@right
def averaged_in_half_precision(m: Model, batch: Any) -> None:
    _, [gradient] = replicax.value_and_grad(lambda: jnp.mean(m.errors(batch)), [m.w])()
    total = here().all_reduce("mean", gradient.astype(jnp.bfloat16))
    m.w.assign_sub(0.1 * total.astype(jnp.float32))


@right
def exchanged_by_all_gather(m: Model, batch: Any) -> None:
    _, [gradient] = replicax.value_and_grad(lambda: jnp.mean(m.errors(batch)), [m.w])()
    m.w.assign_sub(0.1 * here().all_gather(gradient[None], axis=0).mean(0))


@right
def shares_of_each_example_that_are_meant(m: Model, batch: Any) -> None:
    m.train(lambda: jnp.sum(replicax.as_share(m.errors(batch) / m.whole)))
