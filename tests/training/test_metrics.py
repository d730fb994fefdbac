"""Metrics on whole batches; on padded and uneven ones see tests/execution/test_padding.py."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import replicax


def test_every_example_counts_the_same_and_weights_count_as_they_say(strategy) -> None:
    with strategy.scope():
        mean = replicax.Mean("loss")
    values, weights = np.arange(8, dtype=np.float32), np.arange(8, dtype=np.float32) % 3
    for b in strategy.distribute_dataset([{"v": values[:4], "w": weights[:4]}, {"v": values[4:], "w": weights[4:]}]):
        strategy.run(lambda b: mean.update(b["v"], b["w"]), args=(b,))
    assert float(mean.result()) == pytest.approx(np.average(values, weights=weights))
    mean.reset()
    assert float(mean.result()) == 0.0


def test_accuracy_takes_classes_or_scores() -> None:
    accuracy = replicax.Accuracy()
    accuracy.update(jnp.array([0, 1]), jnp.array([0, 0]))
    accuracy.update(jnp.array([1, 1]), jnp.array([[0.1, 0.9], [0.2, 0.8]]))
    assert float(accuracy.result()) == 0.75


def test_wrong_input_is_refused(pair) -> None:
    with pair.scope():
        mean, accuracy = replicax.Mean(), replicax.Accuracy()
        with pytest.raises(replicax.ContextError, match="call it inside the step"):
            mean.update(1.0)
    with pytest.raises(replicax.ContextError, match=r"Mean.result was called inside a step"):
        pair.run(mean.result)
    with pytest.raises(ValueError, match=r"sample_weight of shape \(2,\) does not fit values of shape \(3,\)"):
        pair.run(lambda: mean.update(jnp.ones(3), jnp.ones(2)))
    with pytest.raises(ValueError, match=r"labels of shape \(3,\) need predictions of that shape"):
        pair.run(lambda: accuracy.update(jnp.ones(3, int), jnp.ones(2, int)))
