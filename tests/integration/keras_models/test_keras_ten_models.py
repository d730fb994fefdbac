"""Ten models, on one device under Keras alone, and on replicas: the same losses, metrics and predictions."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import replicax
from tests.integration.keras_models.zoo import CASES, trained


def _check_agree(found: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), found, expected)


@pytest.mark.parametrize("name", CASES)
def test_as_on_one_device(name: str) -> None:
    expected = trained(CASES[name], replicated=False)
    with replicax.MirroredStrategy([f"cpu:{i}" for i in range(4)]).scope():
        found = trained(CASES[name], replicated=True)
    _check_agree(found, expected)


@pytest.mark.parametrize("name", ["cnn", "two ways", "own step"])
def test_several_steps_in_one_program(name: str) -> None:
    expected = trained(CASES[name], replicated=False)
    with replicax.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        found = trained(CASES[name], replicated=True, steps_per_execution=2)
    _check_agree(found, expected)


@pytest.mark.parametrize("name", ["weighted", "two ways", "with losses"])
def test_as_plain_python(name: str) -> None:
    expected = trained(CASES[name], replicated=False, epochs=1)
    with replicax.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        found = trained(CASES[name], replicated=True, epochs=1, run_eagerly=True)
    _check_agree(found, expected)


def test_parameters_in_pieces() -> None:
    expected = trained(CASES["transformer"], replicated=False)
    with replicax.ShardedStrategy([f"cpu:{i}" for i in range(4)]).scope():
        found = trained(CASES["transformer"], replicated=True)
    _check_agree(found, expected)
