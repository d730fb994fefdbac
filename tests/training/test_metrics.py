"""Metrics on whole batches; on padded and uneven ones see tests/padding/test_padded_steps.py."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from tests.conftest import logical_strategy


def test_every_example_counts_the_same_and_weights_count_as_they_say(strategy) -> None:
    with strategy.scope():
        mean = replicax.Mean("loss")
    values, weights = np.arange(8, dtype=np.float32), np.arange(8, dtype=np.float32) % 3
    for b in strategy.distribute_dataset([{"v": values[:4], "w": weights[:4]}, {"v": values[4:], "w": weights[4:]}]):
        strategy.run(lambda b: mean.update(b["v"], b["w"]), args=(b,))
    assert float(mean.result()) == pytest.approx(np.average(values, weights=weights))
    mean.reset()
    assert float(mean.result()) == 0.0


@pytest.mark.parametrize("replicas", [1, 2])
def test_values_may_be_on_any_stage_of_a_pipeline(replicas) -> None:
    strategy = logical_strategy(replicas, 2)
    with strategy.scope():
        mean = replicax.Mean()
    strategy.run(lambda x: mean.update(strategy.assign_to_logical_device(x, 1)), args=(np.arange(8, dtype=np.float32),))
    assert mean.variables["total"].layout.logical_device == 1
    assert float(mean.result()) == 3.5


def test_accuracy_takes_classes_or_scores() -> None:
    accuracy = replicax.Accuracy()
    accuracy.update(jnp.array([0, 1]), jnp.array([0, 0]))
    accuracy.update(jnp.array([1, 1]), jnp.array([[0.1, 0.9], [0.2, 0.8]]))
    assert float(accuracy.result()) == 0.75


def test_wrong_input_is_refused(pair) -> None:
    with pair.scope():
        mean, accuracy = replicax.Mean(), replicax.Accuracy()
        with pytest.raises(replicax.errors.ContextError, match="call it inside a step"):
            mean.update(1.0)
    with pytest.raises(replicax.errors.ContextError, match=r"call it inside a step of MirroredStrategy"):
        mean.update(1.0)
    with pytest.raises(replicax.errors.ContextError, match=r"Mean.result was called inside a step"):
        pair.run(mean.result)
    with pytest.raises(ValueError, match=r"sample_weight of shape \(2,\) does not fit values of shape \(3,\)"):
        pair.run(lambda: mean.update(jnp.ones(3), jnp.ones(2)))
    for values in [("x",), (None,), (1.0, "heavy")]:
        with pytest.raises(TypeError, match=r"Mean.update: (values|sample_weight) is .*, and not an array of numbers"):
            pair.run(lambda values=values: mean.update(*values))
    with pytest.raises(ValueError, match=r"labels of shape \(3,\) need predictions of that shape"):
        pair.run(lambda: accuracy.update(jnp.ones(3, int), jnp.ones(2, int)))


def accuracy_of(labels, predictions, **options) -> float:
    accuracy = replicax.Accuracy(**options)
    accuracy.update(labels, predictions)
    return float(accuracy.result())


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize(
    "labels", [np.array([1, 1, 0, 0]), np.array([True, True, False, False]), np.array([1.0, 1, 0, 0])]
)
def test_scores_of_one_class_are_compared_with_a_threshold(labels, dtype) -> None:
    scores = np.array([0.9, 0.5, 0.1, 0.2], np.float32).astype(dtype)
    assert accuracy_of(labels, scores) == 0.75  # 0.5 is not above it
    assert accuracy_of(labels, scores[:, None]) == 0.75
    assert accuracy_of(labels[:, None], scores[:, None]) == 0.75
    assert accuracy_of(labels, scores - 0.55, threshold=0) == 0.75  # logits
    assert accuracy_of(labels, scores, threshold=np.float32(0.15)) == 0.75


def test_classes_with_a_dim_of_their_own_are_classes() -> None:
    assert accuracy_of(np.array([0, 2, 1]), np.array([[0], [2], [2]])) == pytest.approx(2 / 3)
    assert accuracy_of(np.array([0, 1], np.uint8), np.array([256, 1])) == 0.5  # and not what uint8 makes of 256


def test_labels_that_could_be_one_hot_are_refused_unless_a_threshold_is_given() -> None:
    labels, scores = np.array([[1, 0, 0], [0, 1, 1]]), np.array([[0.9, 0.2, 0.6], [0.1, 0.8, 0.7]])
    with pytest.raises(ValueError, match=r"the same shape \(2, 3\).* labels.argmax\(-1\).* Accuracy\(threshold=0.5\)"):
        accuracy_of(labels, scores)
    assert accuracy_of(labels, scores, threshold=0.5) == pytest.approx(5 / 6)
    with pytest.raises(ValueError, match="threshold must be a number, such as 0.5, got '1'"):
        replicax.Accuracy(threshold="1")


def test_odd_shapes() -> None:
    assert accuracy_of(np.zeros(0, int), np.zeros((0, 3))) == 0.0  # nothing yet
    assert accuracy_of(1, np.array([0.1, 0.9])) == 1.0
    for labels, predictions in (((2,), (2, 0)), ((2, 1), (2,)), ((2, 1), (2, 3)), ((2,), (3, 4)), ((2,), (2, 3, 4))):
        with pytest.raises(ValueError, match="need predictions of that shape, or with a further dim"):
            accuracy_of(np.zeros(labels, int), np.zeros(predictions))
    mean = replicax.Mean()
    with pytest.raises(ValueError, match="Mean.update: values must be real, got"):
        mean.update(np.array([1j]))
    for pair, name in ((([1j], [1]), "labels"), (([1], [1j]), "predictions")):
        with pytest.raises(ValueError, match=f"Accuracy.update: {name} must be real, got"):
            accuracy_of(*map(np.array, pair))
    with pytest.raises(ValueError, match="Mean.update: sample_weight must be real, got"):
        mean.update(np.ones(2), np.array([1j, 1j]))
    mean.update(np.zeros((0, 3)))
    assert float(mean.result()) == 0.0


@pytest.mark.parametrize("partial", ["exact", "pad"])
def test_accuracy_of_probabilities_leaves_padding_out(strategy, partial) -> None:
    with strategy.scope():
        accuracy = replicax.Accuracy()
    options = replicax.InputOptions(partial_batch=partial)
    x = np.array([0.9, 0.2, 0.7, 0.6, 0.8, 0.1], np.float32)[:, None]
    y = np.array([1, 0, 1, 0, 1, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", replicax.errors.ExecutorWarning)
        for b in strategy.distribute_dataset([{"x": x[:4], "y": y[:4]}, {"x": x[4:], "y": y[4:]}], options):
            strategy.run(lambda b: accuracy.update(b["y"], b["x"]), args=(b,))
    assert float(accuracy.result()) == pytest.approx(4 / 6)


def test_results_and_resets_have_no_implicit_transfer(strategy) -> None:
    with strategy.scope():
        mean = replicax.Mean()
    strategy.run(mean.update, args=(jnp.float32(3.0),))
    with jax.transfer_guard("disallow"):
        found = mean.result()
        mean.reset()
        assert (found.tolist(), mean.result().tolist()) == (3.0, 0.0)
