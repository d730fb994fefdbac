from __future__ import annotations

import datasets
import grain
import numpy as np
import pytest

from replicax.integrations.converted_dataset import adapted

datasets.disable_progress_bars()


def table() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"x": [[float(i), 0.5] for i in range(10)], "y": list(range(10))})


def test_a_dataset_has_random_access() -> None:
    found = adapted(table())
    assert isinstance(found.batches, grain.MapDataset)
    assert found.length == len(found.batches) == 10
    assert found.unrepeatable is None
    row = found.batches[3]
    np.testing.assert_equal(row, {"x": np.float32([3, 0.5]), "y": np.int64(3)})
    batches = list(found.batches.seed(1).shuffle().batch(5).to_iter_dataset())
    assert sorted(np.concatenate([b["y"] for b in batches])) == list(range(10))
    assert batches[0]["x"].shape == (5, 2)
    grain.experimental.assert_equal_output_after_checkpoint(found.batches.batch(2).to_iter_dataset())


def test_its_own_batches() -> None:
    found = adapted(table().batch(4))
    assert [b["y"].tolist() for b in found.batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert found.batches[0]["x"].shape == (4, 2)


@pytest.mark.parametrize("name", ["torch", "tensorflow", "jax", "pandas", None])
def test_another_format_makes_no_difference(name) -> None:
    np.testing.assert_equal(adapted(table().with_format(name)).batches[1], adapted(table()).batches[1])


def test_formats_of_ones_own() -> None:
    assert adapted(table().with_format("numpy", dtype=None)).batches[0]["x"].dtype == np.float64
    words = table().add_column("words", ["a b"] * 10)  # which a transform may make numbers of
    changed = words.with_transform(lambda rows: {"z": np.array(rows["y"]) + len(rows["words"][0])})
    assert adapted(changed).batches[3]["z"] == 6


def test_shuffled_rows_stay_where_they_are() -> None:
    found = adapted(table().shuffle())  # drawn once
    assert found.unrepeatable is None
    assert [r["y"] for r in found.batches] == [r["y"] for r in found.batches]


def test_an_iterable_dataset() -> None:
    found = adapted(table().to_iterable_dataset())
    for _ in range(2):
        rows = list(found.batches)
        assert [int(r["y"]) for r in rows] == list(range(10))
        assert rows[0]["x"].dtype == np.float32
    assert found.length is None
    assert found.unrepeatable is None
    batches = list(adapted(table().to_iterable_dataset().batch(4)).batches)
    assert [b["x"].shape for b in batches] == [(4, 2), (4, 2), (2, 2)]


@pytest.mark.parametrize("after", [lambda d: d, lambda d: d.map(lambda r: r), lambda d: d.take(5)])
def test_an_iterable_dataset_that_is_shuffled(after) -> None:
    stream = table().to_iterable_dataset(num_shards=2)
    assert "shuffled without a seed" in adapted(after(stream.shuffle(buffer_size=4))).unrepeatable
    seeded = adapted(after(stream.shuffle(seed=3, buffer_size=4)))
    assert seeded.unrepeatable is None
    assert [int(r["y"]) for r in seeded.batches] == [int(r["y"]) for r in seeded.batches]


@pytest.mark.parametrize("make", [lambda d: d, lambda d: d.to_iterable_dataset()])
@pytest.mark.parametrize(
    ("column", "message"),
    [
        (["a", "b"], r"column 'c' holds strings, which can't be laid on a device\. Leave the column out"),
        ([["a"], ["b"]], r"column 'c' holds strings"),
        ([{"s": "a"}, {"s": "b"}], r"column 'c', field 's' holds strings"),
        ([b"a", b"b"], r"column 'c' holds binarys"),
    ],
)
def test_columns_of_strings(make, column, message) -> None:
    with pytest.raises(TypeError, match=message):
        adapted(make(datasets.Dataset.from_dict({"c": column})))


def test_values_that_are_no_arrays() -> None:
    ragged = datasets.Dataset.from_dict({"x": [[1], [2, 3]]})
    assert [r["x"].tolist() for r in adapted(ragged).batches] == [[1], [2, 3]]
    with pytest.raises(TypeError, match=r"row 0\['x'\] is an array of objects, such as rows that differ in length"):
        adapted(ragged.batch(2)).batches[0]
    unknown = datasets.IterableDataset.from_generator(lambda: iter([{"s": "a"}]))
    with pytest.raises(TypeError, match=r"element 0\['s'\] is"):
        next(iter(adapted(unknown).batches))


def test_a_dict_of_splits() -> None:
    with pytest.raises(
        TypeError, match=r"DatasetDict holds several datasets, .* choose one, such as dataset\['train'\]"
    ):
        adapted(datasets.DatasetDict({"train": table()}))
