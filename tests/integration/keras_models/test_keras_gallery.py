"""The gallery's programs: the same curve on one device and on four replicas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import replicax
from examples.gallery.keras import cnn, recommender, transformer

PROGRAMS: dict[str, Any] = {
    "cnn": (cnn, {"epochs": 2, "rows": 300, "dropout": 0.0}),
    "transformer": (transformer, {"epochs": 1, "rows": 500, "dropout": 0.0}),
    "recommender": (recommender, {"epochs": 2, "rows": 3000}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_on_replicas(name: str) -> None:
    program, settings = PROGRAMS[name]
    expected = program.main(replicax.OneDeviceStrategy("cpu:0"), verbose=0, **settings)
    found = program.main(replicax.MirroredStrategy([f"cpu:{i}" for i in range(4)]), verbose=0, **settings)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-4)
    assert len(found[0]) == settings["epochs"]
