from __future__ import annotations

import contextlib
import dataclasses
import functools

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.data.batches.rows import Checker

BATCHES = [{"x": np.arange(i, i + 12, dtype=np.float32).reshape(4, 3), "y": np.arange(4) + i} for i in range(3)]


def rows(strategy, dataset):
    """Every batch, put together again from what the replicas got."""
    return [jax.tree.map(np.asarray, strategy.gather(batch, 0)) for batch in strategy.distribute_dataset(dataset)]


class Reiterable:
    def __iter__(self):
        return iter(BATCHES)


SOURCES = {
    "a list": BATCHES,
    "a re-iterable": Reiterable(),
    "a pytree of arrays": {"x": np.stack([b["x"] for b in BATCHES]), "y": np.stack([b["y"] for b in BATCHES])},
    "grain map": grain.MapDataset.source(BATCHES),
    "grain iter": grain.MapDataset.source(BATCHES).to_iter_dataset(),
    "grain batched": grain.MapDataset.source(
        [{"x": b["x"][i], "y": b["y"][i]} for b in BATCHES for i in range(4)]
    ).batch(4),
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_replica_gets_its_share_in_order(strategy, name) -> None:
    for _ in range(2):  # iterating again restarts
        got = rows(strategy, SOURCES[name])
        assert len(got) == len(BATCHES)
        for a, b in zip(got, BATCHES, strict=True):
            np.testing.assert_array_equal(a["x"], b["x"])
            np.testing.assert_array_equal(a["y"], b["y"])


class Holder:
    def generate(self, n=1):
        for _ in range(n):
            yield np.zeros(4)

    __call__ = generate


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (Holder().generate, "Holder.generate"),
        (Holder(), "Holder"),
        (functools.partial(Holder().generate, n=1), "Holder.generate"),
        (functools.partial(functools.partial(Holder().generate), n=1), "Holder.generate"),
        (lambda: iter([np.zeros(4)]), "<lambda>"),
        (functools.wraps(Holder.generate)(lambda: Holder().generate(1)), "Holder.generate"),
    ],
    ids=["method", "object", "partial", "partial of partial", "returns an iterator", "wraps a method"],
)
def test_functions_that_give_iterators(pair, function, kind, capsys) -> None:
    dataset = pair.distribute_dataset(function)
    assert [len(list(dataset)) for _ in range(2)] == [1, 1]
    assert dataset.plan().source.startswith("the generator function ")
    assert kind in capsys.readouterr().out


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Example:
    x: np.ndarray
    y: np.ndarray


def test_any_pytree_of_arrays_is_a_dataset(pair) -> None:
    dataset = pair.distribute_dataset(Example(np.arange(12).reshape(3, 4), np.zeros((3, 4))))
    assert dataset.cardinality == 3
    got = [pair.gather(element.x, 0).tolist() for element in dataset]
    assert got == np.arange(12).reshape(3, 4).tolist()


def test_components_have_the_per_replica_shape(pair) -> None:
    element = next(iter(pair.distribute_dataset(BATCHES)))
    assert isinstance(element["x"], replicax.PerReplica)
    first, second = pair.local_results(element)
    np.testing.assert_array_equal(first["x"], BATCHES[0]["x"][:2])
    np.testing.assert_array_equal(second["x"], BATCHES[0]["x"][2:])
    assert second["x"].devices() == {jax.devices()[1]}


def test_what_has_one_shape_on_all_replicas_is_one_array_beside_what_has_not(pair) -> None:
    batches = [{"x": np.zeros((2, rows), np.float32), "y": np.arange(2)} for rows in (3, 5)]
    [element] = pair.distribute_datasets_from_function(lambda context: batches)
    assert repr(element["x"]) == "PerReplica(float32[2,3], float32[2,5])"
    assert repr(element["y"]) == "PerReplica(int32[2], 2 replicas: [0 1], [0 1])"


def test_one_replica_gets_bare_arrays() -> None:
    one = replicax.OneDeviceStrategy("cpu:3")
    element = next(iter(one.distribute_dataset(BATCHES)))
    assert isinstance(element["x"], jax.Array)
    assert element["x"].devices() == {jax.devices()[3]}


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ({"x": np.float32(1)}, ValueError, r"element 1\['x'\] is a scalar.*batch the dataset by the global batch"),
        ({"x": 3}, ValueError, r"element 1\['x'\] is a scalar"),
        ((np.zeros((4, 2)), [[3, 4], [5, 6]]), ValueError, r"element 1\[1\] is a list, which .* with np.asarray"),
        ((np.zeros(4), np.int32(1)), ValueError, "if the dataset has examples, batch it .*what is the same for all"),
        ((np.zeros(4), np.zeros(2)), ValueError, r"same dim 0.*, got {'element 1\[0\]': 4, 'element 1\[1\]': 2}"),
        ({"name": "x"}, TypeError, r"element 1\['name'\] is str 'x'; a batch is a pytree of arrays"),
        ({"x": []}, ValueError, r"element 1 is {'x': \[\]}, in which there are no arrays"),
        (None, ValueError, "element 1 is None, in which there are no arrays"),
        (
            np.zeros(4, "m8[s]"),
            TypeError,
            r"element 1 is an array of dtype timedelta64\[s\], which is not an array of numbers",
        ),
        (
            np.zeros(4, [("a", "f4")]),
            TypeError,
            r"element 1 is an array of dtype \[\('a', '<f4'\)\], which is not an array",
        ),
        (
            np.zeros(4, np.longdouble),
            TypeError,
            "element 1 is an array of dtype float128, which is not an array of numbers",
        ),
        (np.ma.masked_array(np.zeros(4)), TypeError, "element 1 is a masked array, whose mask would be lost"),
        (
            jax.random.split(jax.random.key(0), 4),
            TypeError,
            "element 1 holds random keys, and datasets take only numbers",
        ),
    ],
)
def test_what_is_no_batch(pair, batch, error, message) -> None:
    iterator = iter(pair.distribute_dataset([np.zeros(4), batch]))
    next(iterator)
    with pytest.raises(error, match=message):
        next(iterator)


def test_an_error_that_comes_once_while_a_batch_is_checked_is_raised(pair, monkeypatch) -> None:
    rows, calls = Checker.rows, []

    def fails_once(*args):
        calls.append(args)
        if len(calls) == 1:
            raise MemoryError("no room")
        return rows(*args)

    monkeypatch.setattr(Checker, "rows", fails_once)
    with pytest.raises(MemoryError, match="no room"):
        next(iter(pair.distribute_dataset([np.zeros(4)])))


@pytest.mark.parametrize("error", [None, OSError("no such disk")])
def test_an_iterator_that_only_shows_the_form_of_batches_is_closed(pair, error) -> None:
    open_readers = []

    class Reader:
        def __iter__(self):
            return self

        def __next__(self):
            if error is not None:
                raise error  # and not: the dataset is empty
            return np.zeros(4)

        def close(self):
            open_readers.remove(self)

    class Dataset:
        def __iter__(self):
            open_readers.append(Reader())
            return open_readers[-1]

    with pytest.raises(OSError, match="no such disk") if error else contextlib.nullcontext() as failed:
        assert pair.distribute_dataset(Dataset()).element_spec.shape == (2,)
    assert not open_readers, failed  # which has the frame that reads


@pytest.mark.parametrize("arrays", [np.zeros(4), (np.zeros((4, 3)), np.zeros(4)), {"x": [np.zeros(4), np.zeros(4)]}])
def test_arrays_as_a_dataset_whose_slices_are_scalars(pair, arrays) -> None:
    dataset = pair.distribute_dataset(arrays)
    for look in (lambda: next(iter(dataset)), lambda: dataset.element_spec):
        with pytest.raises(ValueError, match=r"slices along dim 0 is a batch.*make_numpy_dataset\(\(x, y\)\).batch"):
            look()


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (iter(BATCHES), "iterated anew for each epoch, got the iterator"),
        ((b for b in BATCHES), "iterated anew"),
        (3, "takes a Grain dataset.*got 3"),
        (None, "takes a Grain dataset.*got None"),
        (list, "takes a Grain dataset.*got <class 'list'>"),
        ("train.csv", "takes a Grain dataset.*got 'train.csv'"),
        ({"x": "train.csv"}, "takes a Grain dataset.*got {'x': 'train.csv'}"),
    ],
)
def test_what_is_no_dataset(pair, dataset, message) -> None:
    with pytest.raises(TypeError, match=message):
        pair.distribute_dataset(dataset)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_dataset_is_distributed_once(replicas) -> None:
    strategy = replicax.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    distributed = strategy.distribute_dataset(BATCHES)
    for again in (
        lambda: strategy.distribute_dataset(distributed),
        lambda: strategy.distribute_datasets_from_function(lambda context: distributed),
    ):
        with pytest.raises(TypeError, match=r"batches are not distributed yet, got DistributedDataset\(a list"):
            again()


@pytest.mark.parametrize("rows", [4, 5])  # 5 do not divide
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_buffer_that_is_filled_again(rows, replicas) -> None:
    class Refilled:
        def __iter__(self):
            memory = np.zeros(rows * 4000 + 64, np.uint8)
            aligned = memory[-memory.ctypes.data % 64 :][: rows * 4000]  # so that JAX could take it as it is
            buffer = aligned.view(np.float32).reshape(rows, 1000)
            for i in range(20):
                buffer[:] = i
                yield buffer

    strategy = replicax.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    kept = list(strategy.distribute_dataset(Refilled()))
    for i, batch in enumerate(kept):
        np.testing.assert_array_equal(np.asarray(strategy.gather(batch, 0)), np.full((rows, 1000), i))


def test_a_buffer_that_is_filled_again_for_each_replica(pair) -> None:
    def refilled():
        buffer = np.zeros(2, np.float32)
        for i in range(5):
            buffer[:] = i
            yield buffer

    elements = pair.distribute_datasets_from_function(lambda context: refilled)
    assert [[np.asarray(x).tolist() for x in element.values] for element in elements] == [
        [[0, 0], [1, 1]],
        [[2, 2], [3, 3]],
        [[4, 4], []],
    ]


@pytest.mark.parametrize("mode", ["exact", "pad"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_batch_of_one_example_is_a_copy(replicas, mode) -> None:
    memory = np.zeros(3 * 4000 + 64, np.uint8)  # each row where JAX could take it as it is
    examples = memory[-memory.ctypes.data % 64 :][: 3 * 3840].view(np.float32).reshape(3, 960)
    examples[:] = np.arange(3)[:, None]
    strategy = replicax.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    dataset = strategy.make_numpy_dataset(examples).batch(1)
    kept = list(strategy.distribute_dataset(dataset, replicax.InputOptions(partial_batch=mode)))
    examples[:] = -1
    for i, batch in enumerate(kept):
        np.testing.assert_array_equal(np.asarray(strategy.gather(batch, 0)), np.full((1, 960), i))


def test_next_inside_a_step(pair) -> None:
    iterator = iter(pair.distribute_dataset(BATCHES))
    with pytest.raises(replicax.errors.ContextError, match=r"next\(iterator\) was called inside a step"):
        pair.run(lambda: next(iterator))
    assert next(iterator)["x"].values[0].shape == (2, 3)  # nothing was taken


@pytest.mark.parametrize("dtype", [bool, jnp.bfloat16, jnp.int4, np.uint8, np.float16, np.complex64])
def test_all_dtypes_of_arrays(strategy, dtype) -> None:
    batch = np.array([0, 1, 1, 0]).astype(dtype)
    dataset = strategy.distribute_dataset([batch])
    assert dataset.element_spec.dtype == dtype
    [element] = dataset
    got = strategy.gather(element, 0)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got), batch)


# --- make_numpy_dataset ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros(3), "b": np.zeros(4)}, r"same dim 0.*input\['a'\]': 3, \"input\['b'\]\": 4|same dim 0"),
        ({"a": np.float32(1)}, r"input\['a'\] is a scalar"),
        ([], "at least one array"),
    ],
)
def test_numpy_examples_that_do_not_fit(pair, arrays, message) -> None:
    with pytest.raises(ValueError, match=message):
        pair.make_numpy_dataset(arrays)


def test_what_are_no_options() -> None:
    with pytest.raises(TypeError, match="strategy.distribute_dataset: options must be InputOptions or None, got 3"):
        replicax.MirroredStrategy(["cpu:0"]).distribute_dataset(np.ones(4), options=3)


@pytest.mark.parametrize("wrapped", [lambda x: x, lambda x: {"a": x}, lambda x: (x,)])
def test_a_list_of_equal_arrays_is_one_array(pair, wrapped) -> None:
    arrays = [np.arange(3.0) + i for i in range(4)]
    examples = pair.make_numpy_dataset(wrapped(arrays))
    assert len(examples) == 4
    np.testing.assert_array_equal(jax.tree_util.tree_leaves(examples[2])[0], arrays[2])
    jax.tree_util.tree_leaves(examples[2])[0][:] = 0  # a copy
    np.testing.assert_array_equal(jax.tree_util.tree_leaves(examples[2])[0], arrays[2])
    assert pair.make_numpy_dataset([1.5, 2.5])[1] == 2.5
    for other in ([np.zeros(3), np.zeros(4)], [{"x": np.zeros(3)}]):
        with pytest.raises(ValueError, match=r"make_numpy_dataset: input.* is a list, .* go into a tuple or a dict"):
            pair.make_numpy_dataset(wrapped(other))


class IndexedOnly:
    def __getitem__(self, index: int) -> np.ndarray:
        return np.zeros(4)


def test_a_function_that_makes_a_dataset_is_refused_at_once(pair) -> None:
    def make():
        return grain.MapDataset.source(np.arange(4.0)).batch(2)

    problem = r"strategy.distribute_dataset\(.*make\(\)\)\. .* goes to strategy.distribute_datasets_from_function"
    for function in (make, lambda: [np.zeros(4)], lambda: IndexedOnly()):
        with pytest.raises(TypeError, match=problem if function is make else "Pass what it returns"):
            pair.distribute_dataset(function)
    problem = r"argument: 'context'.* functools.partial; a function of an InputContext goes to strategy.distribute_d"
    with pytest.raises(TypeError, match=problem):
        pair.distribute_dataset(lambda context: make())
    with pytest.raises(TypeError, match="must give an iterator over batches .*, got 3"):
        pair.distribute_dataset(lambda: 3)


def test_a_function_is_called_once_for_each_pass(pair) -> None:
    calls = []

    def batches():
        calls.append(0)
        return iter([np.zeros(4)])

    dataset = pair.distribute_dataset(batches)
    assert [len(list(dataset)) for _ in range(3)] == [1, 1, 1]
    assert len(calls) == 3
