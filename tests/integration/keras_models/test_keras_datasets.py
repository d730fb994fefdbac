"""Datasets of other libraries, and of Keras with threads: the losses of one device; and datasets that raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers

import replicax

ROWS, BATCH = 38, 12  # the last batch has 2 rows, for 4 replicas
X = np.random.default_rng(0).normal(size=(ROWS, 8)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, size=ROWS).astype("int32")


class Batches(keras.utils.PyDataset):
    """All rows, of which a batch may be missing."""

    def __init__(self, missing: int | None = None, **threads: Any) -> None:
        super().__init__(**threads)
        self.missing = missing

    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, index: int) -> Any:
        if index == self.missing:
            raise KeyError(f"there is no batch {index}")
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return X[rows], Y[rows]


def generator() -> Iterator[Any]:
    while True:
        yield from (Batches()[i] for i in range(len(Batches())))


def of_torch() -> Any:
    torch_data = pytest.importorskip("torch.utils.data")
    from torch import from_numpy

    return torch_data.DataLoader(torch_data.TensorDataset(from_numpy(X), from_numpy(Y)), BATCH, num_workers=2)


def of_tensorflow() -> Any:
    return pytest.importorskip("tensorflow").data.Dataset.from_tensor_slices((X, Y)).batch(BATCH).prefetch(2)


STEPS = {"steps_per_epoch": 4, "validation_steps": 4}
CLASSES = {"class_weight": {0: 1.0, 1: 0.5, 2: 2.0}}
DATASETS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "threads": (lambda: Batches(workers=2), CLASSES),
    "generator": (generator, STEPS),
    "PyTorch": (of_torch, {}),
    "tf.data": (of_tensorflow, CLASSES),
}


def classifier(steps: int = 1) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(16, activation="relu"), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], steps_per_execution=steps)
    return model


def on_replicas(steps: int = 1) -> keras.Model:
    with replicax.MirroredStrategy([f"cpu:{i}" for i in range(4)]).scope():
        return classifier(steps)


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # what PyTorch's workers begin with
@pytest.mark.parametrize("kind", DATASETS)
def test_as_on_one_device(kind: str) -> None:
    make, fit = DATASETS[kind]

    def history(model: keras.Model) -> Any:
        return model.fit(make(), validation_data=make(), epochs=2, verbose=0, shuffle=False, **fit).history

    expected, found = history(classifier()), history(on_replicas())
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name] == pytest.approx(expected[name], abs=1e-6), name


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_dataset_that_raises(workers: int, steps: int) -> None:
    model = on_replicas(steps)
    with pytest.raises(KeyError, match="there is no batch 2"):
        model.fit(Batches(missing=2, workers=workers), verbose=0, shuffle=False)
    assert all(np.isfinite(w).all() for w in model.get_weights())  # which the loop has given back
    assert len(model.fit(Batches(), verbose=0, shuffle=False).history["loss"]) == 1


class OneBuffer(keras.utils.PyDataset):
    """All rows but the last few, where each batch is written over the one before."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__()
        self._x, self._y = x, y
        self._buffers = np.empty_like(x[:BATCH]), np.empty_like(y[:BATCH])

    def __len__(self) -> int:
        return len(self._x) // BATCH

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        for buffer, whole in zip(self._buffers, (self._x, self._y), strict=True):
            buffer[:] = whole[rows]
        return self._buffers


# Older releases put batches on a device themselves, before any model has seen them.
@pytest.mark.skipif(keras.__version__ < "3.15", reason="this Keras reads ahead, and shares the dataset's memory")
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("replicas", [1, 4])
def test_datasets_that_write_over_their_last_batch(replicas: int, steps: int) -> None:
    x, y = np.tile(X, (4, 40)), np.tile(Y, 4)

    def results(model: keras.Model, data: Callable[[Any, Any], Any]) -> Any:
        fit = model.fit(data(x, y), epochs=2, verbose=0, shuffle=False).history
        return fit, model.evaluate(data(x, y), verbose=0), model.predict(data(x, y), verbose=0)

    def model() -> keras.Model:
        keras.utils.set_random_seed(0)
        net = keras.Sequential([keras.Input((x.shape[1],)), layers.Dense(400, activation="relu"), layers.Dense(3)])
        net.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), steps_per_execution=steps)
        return net

    class Fresh(OneBuffer):
        def __getitem__(self, index: int) -> Any:
            return tuple(buffer.copy() for buffer in super().__getitem__(index))

    with replicax.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]).scope():
        found, expected = results(model(), OneBuffer), results(model(), Fresh)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
