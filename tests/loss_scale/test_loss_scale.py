"""The commonest mistake is found in every step that has it, and in no right one."""

from __future__ import annotations

import functools
import linecache
import warnings
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from tests.conftest import shared_strategy, strategy_of
from tests.loss_scale.right_steps import RIGHT
from tests.loss_scale.seeded_mistakes import MISTAKES
from tests.loss_scale.training_steps import REPLICAS, Model, unmarked_value_and_grad
from tests.soaking import soak_except

EXAMPLES = {"": 8, "as_many_examples_as_replicas": REPLICAS}
UNCLEAR = {
    "sum_by_the_size_of_the_slice",
    "half_the_sum_by_the_size_of_the_slice",
    "each_loss_by_the_size_of_the_slice",
    "sum_over_tokens_mean_over_examples",
    "share_by_the_number_of_replicas",
    "share_by_the_number_of_the_strategy",
    "penalty_scaled_twice",
}
"""Mistakes that are not told if there are as many examples as replicas: a number may stand for either."""


@pytest.fixture(scope="module", params=EXAMPLES.values(), ids=EXAMPLES)
def m(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


def told(m: Model, step: Callable[[Model, Any], Any]) -> list[warnings.WarningMessage]:
    """The warnings while ``step`` is traced."""
    with (
        warnings.catch_warnings(record=True) as found,
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        warnings.simplefilter("always")
        m.strategy.extended.trace(functools.partial(step, m), args=(m.batch,))
    return found


def check_found(m: Model, step: Callable[[Model, Any], Any], text: str, missed: Collection[str]) -> None:
    found = told(m, step)
    if step.__name__ in missed or (m.examples == REPLICAS and step.__name__ in UNCLEAR):
        assert [str(w.message) for w in found] == []
        return
    assert len(found) == 1, [str(w.message) for w in found]
    assert found[0].category is replicax.errors.ShareWarning
    assert text in str(found[0].message)
    assert "# wrong" in linecache.getline(found[0].filename, found[0].lineno)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("step", "text"), MISTAKES, ids=[step.__name__ for step, _ in MISTAKES])
def test_mistake_is_found(m: Model, step: Callable[[Model, Any], Any], text: str) -> None:
    check_found(m, step, text, ())


@pytest.mark.covering(1)
@pytest.mark.parametrize("step", soak_except(RIGHT, *RIGHT[::2]), ids=[step.__name__ for step in RIGHT])
def test_right_step_is_not_called_wrong(m: Model, step: Callable[[Model, Any], Any]) -> None:
    assert [str(w.message) for w in told(m, step)] == []


# --- the same where another library differentiates ------------------------------------------------------------

MISSED = {
    "contrast_within_the_slice",
    "penalty_scaled_twice",
    "share_taken_for_a_penalty",
    "root_of_a_share",
    "flooded_share",
}
"""Mistakes that are told of losses of ``value_and_grad`` only: nothing is certain of them by the way back alone."""


@pytest.fixture(scope="module", params=EXAMPLES.values(), ids=EXAMPLES)
def another(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


@pytest.fixture
def unmarked(another: Model, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A model whose losses JAX differentiates, and nobody marks."""
    monkeypatch.setattr(replicax, "value_and_grad", unmarked_value_and_grad)
    return another


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("step", "text"), soak_except(MISTAKES, *MISTAKES[::2]), ids=[step.__name__ for step, _ in MISTAKES]
)
def test_mistake_is_found_in_what_jax_differentiates(
    unmarked: Model, step: Callable[[Model, Any], Any], text: str
) -> None:
    unclear = {"mean_with_a_rule_of_its_own"} if unmarked.examples == REPLICAS else set()
    check_found(unmarked, step, text, MISSED | unclear)


@pytest.mark.covering(1)
@pytest.mark.parametrize("step", soak_except(RIGHT, *RIGHT[1::4]), ids=[step.__name__ for step in RIGHT])
def test_right_step_of_which_jax_differentiates_the_loss(unmarked: Model, step: Callable[[Model, Any], Any]) -> None:
    test_right_step_is_not_called_wrong(unmarked, step)


# --- loops ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value_and_grad", [replicax.value_and_grad, unmarked_value_and_grad], ids=["", "unmarked"])
def test_a_loop_that_makes_ever_more_of_a_sum_comes_to_an_end(
    value_and_grad: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turn(carry: Any, number: Any) -> Any:
        carry = jnp.where(number > 3, carry / 5.0, carry / 3.0) + jnp.broadcast_to(jnp.sum(carry) * 0.2, (3,))
        other = jax.lax.cond(number > 4, lambda c: c * 7.0, lambda c: c / 9.0, carry)
        return jnp.where(number > 5, carry / 11.0, other), None

    def step(m: Model, batch: Any) -> None:
        def loss() -> Any:
            sums = jnp.sum(batch["x"] * m.w.value, axis=0)
            return jnp.sum(jax.lax.scan(turn, sums, jnp.arange(9))[0])

        m.train(loss)

    monkeypatch.setattr(replicax, "value_and_grad", value_and_grad)
    assert told(Model(), step) == []


# --- steps that return what they change ------------------------------------------------------------------------


INJECTED = optax.inject_hyperparams(optax.sgd)(0.1)  # its learning rate is an argument of the step


@pytest.mark.covering(1)
@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adam(0.1), INJECTED], ids=["sgd", "adam", "injected"])
@pytest.mark.parametrize(("op", "is_right"), [("sum", False), ("mean", True)])
def test_pure_steps(pair: replicax.MirroredStrategy, op: str, is_right: bool, tx: Any) -> None:
    def step(w: Any, state: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)  # wrong with a sum
        loss, gradient = replicax.get_replica_context().all_reduce(op, (loss, gradient))
        updates, state = tx.update(gradient, state)
        return optax.apply_updates(w, updates), state, loss, gradient

    w = jnp.ones(3)
    [batch] = pair.distribute_dataset([np.ones((8, 3), np.float32)])
    with warnings.catch_warnings(record=True) as found, jax.numpy_dtype_promotion("standard"):
        warnings.simplefilter("always")
        pair.run(step, args=(w, tx.init(w), batch))
    if is_right:
        assert found == []
    else:
        assert ["a mean over one replica" in str(w.message) for w in found] == [True]
        assert "# wrong" in linecache.getline(found[0].filename, found[0].lineno)


# --- when it is told, and when it is not ----------------------------------------------------------------------


def mean_step(w: replicax.Variable, told_by: Callable[[Any], Any] = lambda loss: loss) -> Callable[[Any], Any]:
    """A step that has the mean over its own examples as its loss."""

    def step(x: Any) -> Any:
        loss, [gradient] = replicax.value_and_grad(lambda: told_by(jnp.mean((x @ w.value) ** 2)), [w])()
        w.assign_sub(0.1 * replicax.get_replica_context().all_reduce("sum", gradient))
        return loss

    return step


def weights(strategy: replicax.Strategy) -> replicax.Variable:
    with strategy.scope():
        return replicax.Variable(np.ones(3, np.float32), name="w")


def batches(strategy: replicax.Strategy, count: int = 8, **options: Any) -> Any:
    data = [np.arange(count * 3, dtype=np.float32).reshape(count, 3) / 10] * 2
    return strategy.distribute_dataset(data, replicax.InputOptions(**options))


def test_one_replica_is_told_nothing() -> None:
    strategy = strategy_of(1)
    strategy.run(mean_step(weights(strategy)), args=(next(iter(batches(strategy))),))


def test_it_is_told_once_before_anything_runs_and_nothing_changes(pair: replicax.MirroredStrategy) -> None:
    w = weights(pair)
    step, batch = mean_step(w), next(iter(batches(pair)))
    for _ in range(2):  # nothing is kept of a program that was refused
        with pytest.raises(
            replicax.errors.ShareWarning, match=r"(?s)'step'.*2 replicas.*variable 'w'.*2 times.*as_share"
        ):
            pair.run(step, args=(batch,))
        assert w.numpy().tolist() == [1.0, 1.0, 1.0]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            pair.run(step, args=(batch,))
    assert [warning.category for warning in found] == [replicax.errors.ShareWarning]
    assert w.numpy().tolist() != [1.0, 1.0, 1.0]


def test_the_sum_is_as_many_times_too_large_as_it_says() -> None:
    changes = []
    for replicas in (1, 4):
        strategy = strategy_of(replicas)
        w = weights(strategy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", replicax.errors.ShareWarning)
            strategy.run(mean_step(w), args=(next(iter(batches(strategy))),))
        changes.append(w.numpy() - 1)
    np.testing.assert_allclose(changes[1], 4 * changes[0], rtol=1e-5)


@pytest.mark.parametrize(("count", "options"), [(7, {"partial_batch": "pad"}), (7, {}), (8, {})], ids=str)
def test_batches_that_are_padded_or_differ_in_size(
    pair: replicax.MirroredStrategy, count: int, options: dict[str, Any]
) -> None:
    with pytest.raises(replicax.errors.ShareWarning, match="a mean over one replica"):
        pair.run(mean_step(weights(pair)), args=(next(iter(batches(pair, count, **options))),))


def test_a_padded_batch_that_is_not_the_first_argument(pair: replicax.MirroredStrategy) -> None:
    step = mean_step(weights(pair))
    with pytest.raises(replicax.errors.ShareWarning, match="a mean over one replica"):
        pair.run(lambda rate, x: step(rate * x), args=(2.0, next(iter(batches(pair, 7, partial_batch="pad")))))


@pytest.mark.parametrize("count", [1, 7, 8])
@pytest.mark.parametrize("is_pure", [False, True], ids=["variables", "pure"])
def test_a_mean_of_means_of_different_numbers(pair: replicax.MirroredStrategy, count: int, is_pure: bool) -> None:
    w = weights(pair)
    average = replicax.get_replica_context

    def step(x: Any) -> None:
        _, [gradient] = replicax.value_and_grad(lambda: jnp.mean((x @ w.value) ** 2), [w])()  # wrong
        w.assign_sub(0.1 * average().all_reduce("mean", gradient))

    def pure(v: Any, x: Any) -> Any:
        return v - 0.1 * average().all_reduce("mean", jax.grad(lambda v: jnp.mean((x @ v) ** 2))(v))  # wrong

    batch = next(iter(batches(pair, count)))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(2):
            pair.run(pure if is_pure else step, args=(np.ones(3, np.float32), batch) if is_pure else (batch,))
    texts = [str(warning.message) for warning in found if warning.category is replicax.errors.ShareWarning]
    if count == 8:
        assert texts == []
    else:
        [text] = texts
        assert "replicas have different numbers here" in text
        assert "compute_average_loss(per_example_losses) and sum" in text


def test_a_gradient_that_is_refused_is_told_as_an_error_only(pair: replicax.MirroredStrategy) -> None:
    w = weights(pair)
    optimizer = replicax.Optimizer(optax.sgd(0.1))

    def step(x: Any) -> None:
        _, gradients = replicax.value_and_grad(lambda: replicax.compute_average_loss(x @ w.value), [w])()
        optimizer.apply_gradients(replicax.get_replica_context().all_reduce("sum", gradients), [w])

    with pytest.raises(replicax.errors.LocalityError, match="has been all-reduced.*aggregate=False"):
        pair.run(step, args=(next(iter(batches(pair))),))


# --- numbers that are returned ----------------------------------------------------------------------------------


def numbers(x: Any) -> dict[str, Any]:
    losses = jnp.square(x).sum(-1)
    return {
        "share": replicax.compute_average_loss(losses),
        "mean": jnp.mean(losses),
        "accuracy": jnp.mean(losses > 1.0),
        "sum": jnp.sum(losses),
        "root": jnp.max(losses),
    }


def test_what_is_returned_is_known_for_a_mean_or_a_share(pair: replicax.MirroredStrategy) -> None:
    returned = pair.run(numbers, args=(next(iter(batches(pair))),))
    scales = {name: value.scale for name, value in returned.items()}
    assert scales == {"share": "share", "mean": "mean", "accuracy": "mean", "sum": None, "root": None}
    for name in ("mean", "accuracy", "sum"):
        pair.reduce("mean", returned[name])
        pair.reduce("sum", returned[name])
    pair.reduce("sum", returned["share"])
    with pytest.raises(
        replicax.errors.ShareWarning, match=r"(?s)reduce\('mean', …\).*1/2 of that mean.*reduce\('sum', value\)"
    ):
        pair.reduce("mean", returned)


def test_many_steps_in_one_dispatch(pair: replicax.MirroredStrategy) -> None:
    step = mean_step(weights(pair))
    with pytest.raises(replicax.errors.ShareWarning, match="a mean over one replica"):
        pair.run_steps(lambda _, x: step(x), iter(batches(pair)), steps=2)


def test_replicas_that_share_a_device() -> None:
    strategy = shared_strategy(4, 2)
    with pytest.raises(replicax.errors.ShareWarning, match="summed over the 4 replicas"):
        strategy.run(mean_step(weights(strategy)), args=(next(iter(batches(strategy))),))


def test_a_plan_tells_it() -> None:
    strategy = replicax.TPUStrategy(replicax.TPUClusterResolver(topology="v5e:2x2"))
    step = mean_step(weights(strategy))
    with pytest.raises(replicax.errors.ShareWarning, match="summed over the 4 replicas"):
        replicax.plan(strategy, step, jax.ShapeDtypeStruct((8, 3), np.float32))


def test_the_per_replica_executor_tells_nothing(pair: replicax.MirroredStrategy) -> None:
    with replicax.debug():
        pair.run(mean_step(weights(pair)), args=(next(iter(batches(pair))),))


def test_what_is_meant_changes_nothing_in_the_program(pair: replicax.MirroredStrategy) -> None:
    batch = next(iter(batches(pair)))
    results, programs = [], []
    for told_by in (lambda loss: loss, replicax.as_share):
        w = weights(pair)
        step = mean_step(w, told_by)
        with warnings.catch_warnings():
            if told_by is not replicax.as_share:
                warnings.simplefilter("ignore", replicax.errors.ShareWarning)
            pair.run(step, args=(batch,))
            programs.append(pair.extended.trace(step, args=(batch,)))
        results.append(w.numpy().tolist())
    assert results[0] == results[1]
    assert len({program.compiled_text().count(" = ") for program in programs}) == 1
    assert [len(program.collectives()) for program in programs] == [1, 1]
    with replicax.debug():
        assert pair.run(replicax.as_share, args=(2.0,)).__class__ is replicax.PerReplica
