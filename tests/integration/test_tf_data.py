from __future__ import annotations

import collections

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from replicax.integrations.converted_dataset import adapted

Pair = collections.namedtuple("Pair", "a b")
Data = tf.data.Dataset


def numbers(n: int = 6) -> Data:
    return Data.from_tensor_slices(np.arange(n, dtype=np.float32))


def test_batches_can_be_had_again_and_again() -> None:
    found = adapted(numbers().batch(4))
    for _ in range(2):
        batches = list(found.batches)
        assert [b.tolist() for b in batches] == [[0, 1, 2, 3], [4, 5]]
        assert all(type(b) is np.ndarray and b.dtype == np.float32 for b in batches)
    assert found.length == 2
    assert found.unrepeatable is None


def test_structures_are_kept() -> None:
    element = Pair(np.int32([1]), {"z": (np.float64([2]), np.bool_([True]))})
    [got] = adapted(Data.from_tensors(element)).batches
    assert type(got) is Pair
    assert type(got.b["z"]) is tuple
    np.testing.assert_equal(got, element)
    assert got.b["z"][0].dtype == np.float64


def test_bfloat16() -> None:
    [got] = adapted(Data.from_tensors(tf.cast([1.5, 2], tf.bfloat16))).batches
    assert got.dtype == ml_dtypes.bfloat16
    assert got.astype(np.float32).tolist() == [1.5, 2]


def test_nothing_is_copied() -> None:
    [got] = adapted(Data.from_tensors(np.zeros(1000))).batches
    assert not got.flags.owndata


@pytest.mark.parametrize(
    ("dataset", "length"),
    [
        (numbers(), 6),
        (numbers().repeat(), None),
        (numbers().filter(lambda x: x > 1), None),
        (numbers().filter(lambda x: x > 1).apply(tf.data.experimental.assert_cardinality(4)), 4),
        (numbers(0), 0),
    ],
)
def test_length(dataset, length) -> None:
    assert adapted(dataset).length == length


@pytest.mark.parametrize(
    ("element", "message"),
    [
        ({"s": tf.constant(["a"])}, r"element\['s'\] is a tensor of strings, which can't be laid on a device"),
        ((1, tf.ragged.constant([[1], [2, 3]])), r"element\[1\] is a ragged tensor \(\.to_tensor\(\) pads it\)"),
        ([tf.sparse.from_dense([[1, 0]])], r"element.* is a sparse tensor \(tf\.sparse\.to_dense"),
        ((tf.quantization.quantize([1.0], 0.0, 2.0, tf.qint8).output,), r"element\[0\] is a tensor of qint8"),
        ({"o": tf.experimental.Optional.from_value(2)}, r"element\['o'\] is no tensor, but described by OptionalSpec"),
    ],
)
def test_what_is_no_array(element, message) -> None:
    dataset = Data.from_tensors(element) if not isinstance(element, list) else Data.from_tensors(element[0])
    with pytest.raises(TypeError, match=message):
        adapted(dataset)


def test_windows_are_no_arrays() -> None:
    with pytest.raises(TypeError, match=r"element is no tensor, but described by DatasetSpec"):
        adapted(numbers().window(2))


def unordered() -> Data:
    options = tf.data.Options()
    options.deterministic = False
    return numbers().with_options(options)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (numbers().shuffle(4).batch(2), "draws another order for every pass"),
        (numbers().shuffle(4, seed=1).map(lambda x: x), "draws another order for every pass"),
        (numbers().shuffle(4, reshuffle_each_iteration=False), "without a seed"),
        (numbers().shuffle(4, seed=1, reshuffle_each_iteration=False), None),
        (Data.zip(numbers(), numbers().shuffle(4)), "draws another order for every pass"),
        (Data.random().take(3), "without a seed"),
        (Data.random(seed=1).take(3), None),
        (numbers().map(lambda x: x, num_parallel_calls=2, deterministic=False), "deterministic=False"),
        (numbers().map(lambda x: x, num_parallel_calls=2), None),
        (unordered(), "options.deterministic = False"),
        (numbers().map(lambda x: x + tf.random.uniform(())), r"draws random numbers \(RandomUniform\)"),
        (
            numbers().map(tf.function(lambda x: x + tf.random.normal(()))),
            r"draws random numbers \(RandomStandardNormal",
        ),
        (numbers().map(lambda x: x + tf.random.stateless_uniform((), [1, 2])), None),
    ],
)
def test_what_can_not_be_repeated(dataset, message) -> None:
    found = adapted(dataset)
    if message is None:
        assert found.unrepeatable is None
        assert list(found.batches) == list(found.batches)
    else:
        with pytest.raises(ValueError, match=message):
            raise ValueError(found.unrepeatable)
