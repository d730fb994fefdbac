"""The script of 2018 trains, and what it computes does not depend on the number of towers, or on the executor."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import replicax
from examples import towers
from replicax.compat import v1 as tf
from tests.programs.programs import third_party


@third_party
@pytest.mark.parametrize(
    "executor",
    [
        pytest.param(contextlib.nullcontext, id="compiled"),
        pytest.param(replicax.debug, id="exact", marks=pytest.mark.soak),  # tests/compat has each of its parts
    ],
)
def test_the_script_of_2018(executor: type, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = 4
    if executor is replicax.debug:  # two steps
        epochs = 1
        images, labels = towers.load_data()
        monkeypatch.setattr(towers, "load_data", lambda: (images[:256], labels[:256]))
    expected = towers.train(tf.OneDeviceStrategy("cpu:0"), epochs)
    with executor():
        found = towers.train(tf.MirroredStrategy(["cpu:0", "cpu:1"]), epochs)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert [step for step, _, _ in found] == [k * len(towers.load_data()[0]) // 128 for k in range(1, epochs + 1)]
    if executor is contextlib.nullcontext:
        assert found[-1][2] > 0.85
