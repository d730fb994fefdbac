"""A metric that is updated with shares, of which it would take the mean, is told."""

from __future__ import annotations

import linecache
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.errors import ShareWarning

X = np.arange(8, dtype=np.float32)


def share_of(x: Any) -> Any:
    return replicax.compute_average_loss(jnp.square(x))


def trained(mean: replicax.Mean, w: replicax.Variable, x: Any) -> None:
    loss, _ = replicax.value_and_grad(lambda: replicax.compute_average_loss(jnp.square(x - w)), [w])()
    mean.update(loss)  # wrong


def evaluated(mean: replicax.Mean, w: replicax.Variable, x: Any) -> None:
    mean.update(share_of(x).astype(jnp.bfloat16))  # wrong


def penalty(mean: replicax.Mean, w: replicax.Variable, x: Any) -> None:
    mean.update(replicax.scale_regularization_loss(w.value))  # wrong


RIGHT: dict[str, Any] = {
    "examples": lambda mean, w, x: mean.update(jnp.square(x)),
    "added up": lambda mean, w, x: mean.update(replicax.get_replica_context().all_reduce("sum", share_of(x))),
    "times a number": lambda mean, w, x: mean.update(2 * share_of(x)),  # there are two replicas
    "as a weight": lambda mean, w, x: mean.update(30.0, sample_weight=share_of(x)),
}


def told(pair: replicax.MirroredStrategy, step: Any) -> tuple[list[warnings.WarningMessage], float]:
    """The warnings of a step, and the mean after it."""
    with pair.scope():
        mean, w = replicax.Mean(), replicax.Variable(0.0, name="w")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for x in pair.distribute_dataset([X]):
            pair.run(lambda x: step(mean, w, x), args=(x,))
    return found, float(mean.result())


@pytest.mark.parametrize("step", [trained, evaluated, penalty])
def test_a_mean_of_shares(pair: replicax.MirroredStrategy, step: Any) -> None:
    [warning], _ = told(pair, step)
    assert warning.category is ShareWarning
    assert "# wrong" in linecache.getline(warning.filename, warning.lineno)
    for part in ("that is 1/2 of what it should be", "mean.update(per_example_losses)"):
        assert part in str(warning.message)


@pytest.mark.parametrize("step", RIGHT.values(), ids=RIGHT)
def test_a_mean_of_values(pair: replicax.MirroredStrategy, step: Any) -> None:
    found, mean = told(pair, step)
    assert found == []
    assert mean == pytest.approx(30.0 if step is RIGHT["as a weight"] else np.mean(X**2))


def test_a_mean_of_shares_that_is_meant(pair: replicax.MirroredStrategy) -> None:
    found, mean = told(pair, lambda mean, w, x: mean.update(replicax.as_share(share_of(x))))
    assert found == []
    assert mean == pytest.approx(np.mean(X**2) / 2)
