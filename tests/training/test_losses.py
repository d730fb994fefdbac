from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import replicax

LOSSES = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 12.0], np.float32)


def shares(strategy, losses, **options):
    batch = next(iter(strategy.distribute_dataset([losses])))
    return strategy.run(lambda x: replicax.compute_average_loss(x, **options), args=(batch,))


def test_shares_sum_to_the_mean(strategy) -> None:
    assert float(strategy.reduce("sum", shares(strategy, LOSSES))) == pytest.approx(5.0)


LOSSES_OF_STEPS = LOSSES[:, None, None] * np.arange(1.0, 7.0, dtype=np.float32).reshape(3, 2)
"""``[batch, 3, 2]``."""


@pytest.mark.parametrize(("reduce_dims", "expected"), [("sum", 5.0 * 21.0), ("mean", LOSSES_OF_STEPS.mean())])
def test_further_dims_are_reduced_within_an_example(strategy, reduce_dims, expected) -> None:
    share = shares(strategy, LOSSES_OF_STEPS, reduce_dims=reduce_dims)
    assert float(strategy.reduce("sum", share)) == pytest.approx(expected)


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_further_dims_are_added_up_with_a_warning(strategy, executor) -> None:
    batch = next(iter(strategy.distribute_dataset([LOSSES_OF_STEPS])))
    step = lambda losses: replicax.compute_average_loss(losses)  # noqa: E731
    with pytest.warns(
        replicax.errors.ShareWarning,
        match=r"(?s)added up.*6 times the share of losses.mean\(\).*reduce_dims='mean'.*'sum'",
    ) as found:
        share = strategy.run(step, args=(batch,), options=replicax.RunOptions(executor))
    assert {warning.filename for warning in found} == {__file__}
    assert float(strategy.reduce("sum", share)) == pytest.approx(5.0 * 21.0)


def test_further_dims_of_one_entry_are_no_question(strategy) -> None:
    assert float(strategy.reduce("sum", shares(strategy, LOSSES[:, None]))) == pytest.approx(5.0)


def test_a_mean_over_no_steps_is_zero(strategy) -> None:
    share = shares(strategy, np.zeros((8, 0), np.float32), reduce_dims="mean")
    assert float(strategy.reduce("sum", share)) == 0.0


def test_the_global_batch_size_may_be_given(strategy) -> None:
    share = shares(strategy, LOSSES, global_batch_size=4)
    assert float(strategy.reduce("sum", share)) == pytest.approx(10.0)


def test_weights_scale_the_sum_and_not_the_count(strategy) -> None:
    weight = np.array([1, 0, 1, 0, 1, 0, 1, 0], np.float32)
    batch = next(iter(strategy.distribute_dataset([{"x": LOSSES, "w": weight}])))
    share = strategy.run(lambda b: replicax.compute_average_loss(b["x"], b["w"]), args=(batch,))
    assert float(strategy.reduce("sum", share)) == pytest.approx(16 / 8)


def test_counting_costs_no_collective(pair) -> None:
    program = pair.extended.trace(replicax.compute_average_loss, args=(jnp.ones(4),))
    assert program.collectives() == []


def test_regularization_is_counted_once(strategy) -> None:
    share = strategy.run(lambda: replicax.scale_regularization_loss(3.0))
    assert float(strategy.reduce("sum", share)) == pytest.approx(3.0)


def test_half_precision_can_count(strategy) -> None:
    losses = np.ones(8, np.float16)
    share = shares(strategy, losses, global_batch_size=100_000)
    assert float(strategy.reduce("sum", share)) == pytest.approx(8e-5, rel=1e-2)


def test_both_work_outside_every_step() -> None:
    assert float(replicax.compute_average_loss([1.0, 3.0])) == 2.0
    assert float(replicax.compute_average_loss([])) == 0.0
    assert float(replicax.scale_regularization_loss(3.0)) == 3.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: replicax.compute_average_loss(1.0), "an entry for each example, got a scalar"),
        (
            lambda: replicax.compute_average_loss(jnp.ones(3), jnp.ones(2)),
            r"sample_weight of shape \(2,\) does not fit",
        ),
        (lambda: replicax.compute_average_loss(jnp.ones(2), [1j, 1.0]), "sample_weight must be real, got"),
        (lambda: replicax.compute_average_loss(jnp.ones(3), global_batch_size=0), "must be positive, got 0"),
        (lambda: replicax.compute_average_loss(jnp.ones(3), global_batch_size=np.array(-4)), "be positive, got -4"),
        (
            lambda: replicax.compute_average_loss(jnp.ones((3, 2)), reduce_dims="max"),
            "reduce_dims must be 'mean', 'sum' or None, got 'max'",
        ),
    ],
)
def test_bad_input(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("weights", [[[1.0], [2.0, 3.0]], object()])
def test_weights_that_are_no_numbers(weights) -> None:
    with pytest.raises(TypeError, match=r"compute_average_loss: sample_weight is .*, and not an array of numbers"):
        replicax.compute_average_loss(jnp.ones(2), weights)


def test_a_truth_value_is_no_size_of_a_batch() -> None:
    with pytest.raises(TypeError, match="global_batch_size must be an int, or a scalar array, got True"):
        replicax.compute_average_loss(jnp.ones(3), global_batch_size=True)


def test_integers_of_numpy_become_floats_at_once(pair) -> None:
    share = pair.run(lambda: replicax.compute_average_loss(np.array([2**40])))
    assert float(pair.reduce("sum", share)) == 2**40
    share = pair.run(lambda: replicax.compute_average_loss(np.ones(2), [2**40, 0]))
    assert float(pair.reduce("sum", share)) == 2**39


@pytest.mark.parametrize(
    "call", [lambda: replicax.compute_average_loss(jnp.ones(3)), lambda: replicax.scale_regularization_loss(1.0)]
)
def test_across_replicas_there_is_no_share(pair, call) -> None:
    with pair.scope(), pytest.raises(replicax.errors.ContextError, match="one replica's share: call it inside a step"):
        call()


def test_losses_of_integers_have_a_fractional_mean(pair) -> None:
    losses = pair.distribute_values_from_function(lambda ctx: np.array([[1, 2], [3, 7]][ctx.replica_id_in_sync_group]))
    shares = pair.run(replicax.compute_average_loss, args=(losses,))
    assert [float(s) for s in pair.local_results(shares)] == [0.75, 2.5]
