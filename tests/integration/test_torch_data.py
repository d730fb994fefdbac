from __future__ import annotations

import collections
import gc
import multiprocessing
import pickle
import warnings

import grain
import ml_dtypes
import numpy as np
import pytest
import torch
import torch.utils.data as td

from replicax.integrations.converted_dataset import adapted

Pair = collections.namedtuple("Pair", "a b")


class Squares(td.Dataset):
    def __init__(self, n: int = 10) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int):
        if not 0 <= i < self.n:
            raise IndexError(i)
        return {"x": torch.tensor([i, i * i]), "y": i}


class Endless(td.IterableDataset):
    def __iter__(self):
        return iter([torch.tensor([i]) for i in range(5)])


def test_a_data_loader() -> None:
    found = adapted(td.DataLoader(Squares(), batch_size=4))
    for _ in range(2):
        batches = list(found.batches)
        assert [b["y"].tolist() for b in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert batches[0]["x"].tolist() == [[0, 0], [1, 1], [2, 4], [3, 9]]
        assert all(type(b["x"]) is np.ndarray for b in batches)
    assert found.length == 3
    assert found.unrepeatable is None


def test_workers_end_when_the_iterator_is_dropped() -> None:
    loader = td.DataLoader(Squares(), batch_size=2, num_workers=2, multiprocessing_context="spawn")
    found = adapted(loader)
    assert [b["y"].tolist() for b in found.batches] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    iterator = iter(found.batches)
    next(iterator)
    assert len(multiprocessing.active_children()) == 2
    del iterator
    gc.collect()
    assert multiprocessing.active_children() == []


def test_a_dataset_has_random_access() -> None:
    found = adapted(Squares())
    assert isinstance(found.batches, grain.MapDataset)
    assert found.length == len(found.batches) == 10
    assert found.batches[3]["x"].tolist() == [3, 9]
    batches = list(found.batches.seed(1).shuffle().batch(5).to_iter_dataset())
    assert sorted(np.concatenate([b["y"] for b in batches])) == list(range(10))
    grain.experimental.assert_equal_output_after_checkpoint(found.batches.batch(2).to_iter_dataset())
    source = pickle.loads(pickle.dumps(found.batches._source))
    assert source[2]["y"] == 2


@pytest.mark.parametrize(
    "dataset",
    [
        td.TensorDataset(torch.arange(4.0), torch.arange(4)),
        td.Subset(td.TensorDataset(torch.arange(8.0), torch.arange(8)), [0, 1, 2, 3]),
        td.ConcatDataset([td.TensorDataset(torch.arange(2.0) + i, torch.arange(2) + i) for i in (0, 2)]),
    ],
)
def test_pytorchs_own_datasets(dataset) -> None:
    [batch] = adapted(dataset).batches.batch(4)
    assert batch[0].tolist() == batch[1].tolist() == [0, 1, 2, 3]


def test_only_one_thread_is_in_a_dataset() -> None:
    class Delicate(Squares):
        inside = 0

        def __getitem__(self, i: int):
            assert self.inside == 0
            self.inside = 1
            for _ in range(1000):
                pass
            self.inside = 0
            return i

    assert list(adapted(Delicate(500)).batches.to_iter_dataset()) == list(range(500))


def test_an_iterable_dataset() -> None:
    for dataset in (Endless(), td.DataLoader(Endless(), batch_size=None)):
        found = adapted(dataset)
        assert [e.tolist() for e in found.batches] == [e.tolist() for e in found.batches] == [[i] for i in range(5)]
        assert found.length is None
    assert [b.shape for b in adapted(td.DataLoader(Endless(), batch_size=2)).batches] == [(2, 1), (2, 1), (1, 1)]


def test_no_length() -> None:
    class Endless(td.Dataset):
        def __getitem__(self, i: int):
            return i

    with pytest.raises(TypeError, match="Endless is a torch Dataset without __len__"):
        adapted(Endless())


class Elements(td.IterableDataset):
    def __init__(self, *elements) -> None:
        self.elements = elements

    def __iter__(self):
        return iter(self.elements)


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        "float16",
        "int8",
        "uint16",
        "bool",
        "complex64",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ],
)
def test_dtypes(dtype) -> None:
    dtype = getattr(torch, dtype)
    tensor = torch.tensor([[1.0, 2.0], [4.0, 0.5]]).to(dtype)
    for given in (tensor, tensor[1:, ::2], tensor[0, 0]):
        [got] = adapted(Elements(given)).batches
        name = str(dtype).removeprefix("torch.")
        assert got.dtype == np.dtype(getattr(ml_dtypes, name, name))
        assert got.shape == tuple(given.shape)
        np.testing.assert_array_equal(got.astype(np.complex64), given.to(torch.complex64).numpy())
        assert got.__array_interface__["data"][0] == given.data_ptr()  # nothing is copied


def test_tensors_of_other_kinds() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    z = torch.tensor([1 + 2j]).conj()
    element = Pair(x, [z, z.imag, None, np.int8([3]), 4, 0.5])
    [got] = adapted(Elements(element)).batches
    assert type(got) is Pair
    np.testing.assert_equal(
        got, Pair(np.float32([1, 2]), [np.complex64([1 - 2j]), np.float32([-2]), None, [3], 4, 0.5])
    )


@pytest.mark.parametrize(
    ("element", "message"),
    [
        ({"s": "text"}, r"element 1\['s'\] is str 'text', which is not an array of numbers\. Leave it out"),
        ((1, {"s": ["a", "b"]}), r"element 1\[1\]\['s'\]\[0\] is str 'a'"),
        ({"o": object()}, r"element 1\['o'\] is object <object"),
        (np.array(["a"]), r"element 1 is an array of strings"),
        (np.array([None]), r"element 1 is an array of objects"),
        ([torch.eye(2).to_sparse()], r"element 1\[0\] is a sparse_coo tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), r"element 1 is a quantized tensor"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
            r"element 1 is a nested tensor",
        ),
        (
            lambda: torch.tensor([1], dtype=torch.complex32),
            r"element 1 is a tensor of torch.complex32, which NumPy doesn't have",
        ),
    ],
)
def test_what_is_no_array(element, message) -> None:
    if callable(element):  # PyTorch warns of some of its own
        with warnings.catch_warnings(action="ignore"):
            element = element()
    iterator = iter(adapted(Elements(torch.zeros(1), element)).batches)
    next(iterator)
    with pytest.raises(TypeError, match=message):
        next(iterator)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, None),
        ({"sampler": [3, 1, 2]}, None),
        ({"sampler": td.SequentialSampler(Squares())}, None),
        ({"batch_sampler": td.BatchSampler(td.SequentialSampler(Squares()), 2, False)}, None),
        ({"sampler": td.DistributedSampler(Squares(), 2, 1)}, None),
        ({"shuffle": True}, r"shuffles \(RandomSampler\), and draws another order for every pass"),
        ({"shuffle": True, "generator": torch.Generator().manual_seed(1)}, "draws another order for every pass"),
        ({"sampler": td.WeightedRandomSampler([1.0] * 10, 10)}, r"shuffles \(WeightedRandomSampler\)"),
        ({"sampler": td.SubsetRandomSampler(range(10))}, r"shuffles \(SubsetRandomSampler\)"),
        ({"batch_sampler": td.BatchSampler(td.RandomSampler(Squares()), 2, False)}, r"shuffles \(RandomSampler\)"),
        ({"num_workers": 1, "in_order": False}, "in_order=False"),
        ({"in_order": False}, None),
    ],
)
def test_what_can_not_be_repeated(options, message) -> None:
    found = adapted(td.DataLoader(Squares(), **options))
    if message is None:
        assert found.unrepeatable is None
        assert [b["y"].tolist() for b in found.batches] == [b["y"].tolist() for b in found.batches]
    else:
        with pytest.raises(ValueError, match=message):
            raise ValueError(found.unrepeatable)
        if not options.get("num_workers"):  # and it is so
            assert len({str([b["y"].tolist() for b in found.batches]) for _ in range(5)}) > 1
