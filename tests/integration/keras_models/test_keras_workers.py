"""Models on several workers: the same as on one device, and the chief writes the files."""

from __future__ import annotations

import pathlib

import jax
import keras
import numpy as np
import pytest

from tests import processes
from tests.integration.keras_models import workers_keras


@pytest.mark.parametrize(("kind", "steps"), [("mirrored", 1), ("mirrored", 2), ("sharded", 1)])
def test_as_on_one_device(kind: str, steps: int, tmp_path: pathlib.Path) -> None:
    for name in ("alone", "0", "1"):
        (tmp_path / name).mkdir()
    expected = workers_keras.trained(tmp_path / "alone", seed=7)
    found = processes.run(workers_keras.train, kind, tmp_path, steps, devices=[2, 1], timeout=180)
    jax.tree.map(np.testing.assert_array_equal, found[0], found[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found[0], expected)

    written = sorted(path.name for path in (tmp_path / "alone").iterdir())
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == written
    assert not list((tmp_path / "1").iterdir())
    # The sums go in another order from the first step on; what was written is what the model had.
    saved = keras.models.load_model(tmp_path / "alone" / workers_keras.SAVED)
    assert [w.shape for w in saved.get_weights()] == [w.shape for w in found[0]["weights"]]


def test_other_data_on_another_worker() -> None:
    for message in processes.run(workers_keras.train_on_other_data, timeout=120):
        assert "worker 1 has another batch for the Keras model than worker 0" in message


def test_workers_run_the_release_of_keras_that_is_tested() -> None:
    assert processes.run(workers_keras.release, devices=[2, 1], timeout=120) == [keras.__version__] * 2
