"""From another library's dataset to the replicas, and on from where an iterator was."""

from __future__ import annotations

import json

import datasets
import grain
import numpy as np
import pytest
import tensorflow as tf
import torch
import torch.utils.data as td

import replicax

datasets.disable_progress_bars()

X = np.arange(24, dtype=np.float32).reshape(12, 2)


class Rows(td.Dataset):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int):
        return {"x": torch.from_numpy(X[i])}


def table() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"x": X.tolist()})


MAKE = {
    "tf.data": lambda: tf.data.Dataset.from_tensor_slices({"x": X}).batch(4),
    "torch": lambda: td.DataLoader(Rows(), batch_size=4),
    "datasets": lambda: table().batch(4),
    "datasets, streamed": lambda: table().to_iterable_dataset().batch(4),
}
SHUFFLED = {
    "tf.data": lambda: tf.data.Dataset.from_tensor_slices({"x": X}).shuffle(12).batch(4),
    "torch": lambda: td.DataLoader(Rows(), batch_size=4, shuffle=True),
    "datasets, streamed": lambda: table().to_iterable_dataset().shuffle(buffer_size=12).batch(4),
}


@pytest.fixture
def strategy() -> replicax.MirroredStrategy:
    return replicax.MirroredStrategy(["cpu:0", "cpu:1"])


def gathered(strategy, batches):
    return [np.asarray(strategy.gather(batch["x"], 0)) for batch in batches]


@pytest.mark.parametrize("name", MAKE)
def test_every_replica_gets_its_share(strategy, name) -> None:
    distributed = strategy.distribute_dataset(MAKE[name]())
    for _ in range(2):
        np.testing.assert_array_equal(gathered(strategy, distributed), X.reshape(3, 4, 2))
    first = next(iter(distributed))["x"]
    np.testing.assert_array_equal(strategy.local_results(first)[1], X[2:4])


EXAMPLES = {"torch": Rows, "datasets": lambda: table().with_format("numpy")}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_shuffled_and_batched_by_grain(strategy, name) -> None:
    def make(batch):
        return strategy.distribute_dataset(grain.MapDataset.source(EXAMPLES[name]()).seed(0).shuffle().batch(batch))

    iterator = iter(make(4))
    got = gathered(strategy, [next(iterator)])
    restored = iter(make(6))
    restored.set_state(iterator.get_state())
    got = np.concatenate([*got, *gathered(strategy, restored)])
    assert not np.array_equal(got, X)
    np.testing.assert_array_equal(np.sort(got, axis=0), X)


@pytest.mark.parametrize("name", MAKE)
def test_a_restored_iterator_goes_on(strategy, name) -> None:
    iterator = iter(strategy.distribute_dataset(MAKE[name]()))
    next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    restored = iter(strategy.distribute_dataset(MAKE[name]()))
    restored.set_state(state)
    np.testing.assert_array_equal(gathered(strategy, restored), X.reshape(3, 4, 2)[1:])


@pytest.mark.parametrize("name", SHUFFLED)
def test_what_can_not_be_restored_says_so(strategy, name) -> None:
    iterator = iter(strategy.distribute_dataset(SHUFFLED[name]()))
    got = np.concatenate([*gathered(strategy, [next(iterator)]), *gathered(strategy, iterator)])
    np.testing.assert_array_equal(np.sort(got, axis=0), X)
    with pytest.raises(ValueError, match=r"the place in this dataset can't be saved: .*(shuffle|pass)"):
        iterator.get_state()
