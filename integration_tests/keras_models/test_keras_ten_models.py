"""Ten models, on one device under Keras alone, and on replicas: the same losses, metrics and predictions."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from zoo import CASES, trained

import replicax

TOLERANCE = 1e-6


def _agree(found, expected) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE), found, expected)


@pytest.mark.parametrize("name", CASES)
def test_as_on_one_device(name: str) -> None:
    expected = trained(CASES[name], replicated=False)
    with replicax.MirroredStrategy([f"cpu:{i}" for i in range(4)]).scope():
        found = trained(CASES[name], replicated=True)
    _agree(found, expected)
