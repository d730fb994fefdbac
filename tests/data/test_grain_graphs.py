"""Whatever a Grain dataset is made of: each example once, and after a restore what would have come."""

from __future__ import annotations

import collections
import json
import re
import threading

import grain
import jax
import numpy as np
import pytest
from grain import experimental

import replicax
from replicax import InputOptions
from replicax._grain import BatchedSource
from replicax.data.files.file_source import FilesIterator
from replicax.data.reading.pass_iterators import LoaderIterator, ReplayIterator, SequenceIterator
from tests.data.simulated import Run, examples, steps_of
from tests.soaking import soak_except


def numbers():
    return grain.MapDataset.range(26).seed(5)


def padded(examples):
    """A batch whose arrays are as long as its longest example."""
    longest = max(int(x) % 5 + 1 for x in examples)
    return {"id": np.stack(examples), "x": np.zeros((len(examples), longest))}


def numbered_batches():
    return numbers().batch(4)


def batches_one_by_one():
    return numbered_batches().to_iter_dataset()


GRAPHS = {
    "filter, batch": lambda: numbers().to_iter_dataset().filter(lambda x: x % 3 > 0).batch(4),
    "batch, filter": lambda: numbered_batches().filter(lambda x: x[0] % 3 > 0),
    "batch, iterate, filter": lambda: batches_one_by_one().filter(lambda x: x[0] % 3 > 0),
    "shuffle, repeat, batch": lambda: numbers().shuffle().repeat(2).batch(4),
    "batch, shuffle, repeat": lambda: numbered_batches().shuffle().repeat(2),
    "batch, iterate, repeat": lambda: experimental.RepeatIterDataset(batches_one_by_one(), 2),
    "batch, slice": lambda: numbered_batches()[2:5],
    "slice, batch": lambda: numbers()[3:20].batch(4),
    "concatenate": lambda: grain.MapDataset.concatenate([numbers(), numbers()]).batch(4),
    "mix, batch": lambda: grain.MapDataset.mix([numbers(), numbers()]).batch(4),
    "batch, mix": lambda: grain.MapDataset.mix([numbered_batches(), numbered_batches()]),
    "batch, window": lambda: experimental.WindowShuffleIterDataset(batches_one_by_one(), window_size=3, seed=1),
    "batch, limit": lambda: experimental.LimitIterDataset(batches_one_by_one(), 4),
    "batch by a function": lambda: numbers().shuffle().batch(4, batch_fn=padded),
    "batch, batch": lambda: numbers().batch(2).batch(2).map(np.ravel),
    "batch, double": lambda: numbered_batches().map(lambda batch: np.repeat(batch, 2)),
    "random": lambda: numbers().random_map(lambda x, rng: x + 100 * rng.integers(9)).batch(4),
    "batch, random": lambda: numbered_batches().random_map(lambda x, rng: x + 100 * rng.integers(9)),
    "batch, index": lambda: numbered_batches().map_with_index(lambda i, x: x + 100 * i),
    "drop the remainder": lambda: numbers().batch(4, drop_remainder=True),
}


QUICK = (
    "batch, iterate, filter",
    "shuffle, repeat, batch",
    "batch, iterate, repeat",
    "slice, batch",
    "mix, batch",
    "batch, limit",
    "batch by a function",
    "batch, batch",
    "batch, random",
    "drop the remainder",
)


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("lines"))


def write_lines(folder):
    start = 0
    for i, size in enumerate((3, 11, 0, 7, 5)):
        (folder / f"{i}.txt").write_text("".join(f"{n}\n" for n in range(start, start + size)))
        start += size
    return lambda: replicax.data.text_lines(str(folder / "*.txt")).map(lambda line: np.int32(int(line)))


FILED = {
    "window, batch": lambda f: experimental.WindowShuffleIterDataset(f, window_size=13, seed=1).batch(4),
    "batch, window": lambda f: experimental.WindowShuffleIterDataset(f.batch(4), window_size=3, seed=1),
    "repeat, batch": lambda f: experimental.RepeatIterDataset(f, 2).batch(4),
    "batch, repeat": lambda f: experimental.RepeatIterDataset(f.batch(4), 2),
    "limit, batch": lambda f: experimental.LimitIterDataset(f, 14).batch(4),
    "batch, limit": lambda f: experimental.LimitIterDataset(f.batch(4), 4),
    "filter, batch": lambda f: f.filter(lambda x: x % 3 > 0).batch(4),
    "cache, batch": lambda f: experimental.CacheIterDataset(f).batch(4),
    "index, batch": lambda f: experimental.RepeatIterDataset(f.map_with_index(lambda i, x: x + 100 * i), 1).batch(4),
    "batch, prefetch": lambda f: experimental.ThreadPrefetchIterDataset(f.batch(4), prefetch_buffer_size=2),
    "batch by a function": lambda f: f.batch(4, batch_fn=np.stack),
}


def check_graph(make, may_refuse) -> None:
    data = InputOptions(auto_shard_policy="data")
    one = Run(lambda context: make(), 1, 2, data)
    whole = steps_of(one)
    everything = collections.Counter(x for step in whole for part in step for x in part)
    assert one.datasets[0].cardinality in (None, len(whole))
    full = -(-max(sum(map(len, step)) for step in whole) // 2)
    assert jax.tree.leaves(one.datasets[0].element_spec)[0].shape[0] == full
    shared = Run(lambda context: make(), 2, 1).steps()
    assert collections.Counter(x for step in shared for element in step for x in examples(element)) == everything
    for step in shared:  # a function that makes batches gets whole ones
        assert len({tuple(np.shape(leaf)[1:] for leaf in part.leaves) for one in step for part in one.parts}) == 1
    for steps in (0, 1, len(whole) - 1, len(whole)):
        first = Run(lambda context: make(), 1, 2, data)
        first.steps(steps)
        second = Run(lambda context: make(), 1, 2, data)
        second.restore(json.loads(json.dumps(first.state())))
        assert steps_of(second) == whole[steps:]  # what comes is what would have come
    for policy, before, after in [("auto", 1, 2), ("auto", 2, 1), ("auto", 2, 2), ("data", 1, 2)]:
        first = Run(lambda context: make(), before, 1, InputOptions(auto_shard_policy=policy))
        seen = first.seen(2)
        second = Run(lambda context: make(), after, 1)
        why = refused(second, first.state())
        if not why:
            assert seen + second.seen() == everything
        else:
            assert re.search("comes after the batch|nothing but the order is known", why)
            assert may_refuse


ROWS = np.arange(26, dtype=np.int32)


class Numbers:
    """A random-access source of somebody's own."""

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        assert 0 <= index < len(ROWS)
        return ROWS[index]


class Tenfold(grain.MapDataset):
    """A node of somebody's own."""

    def __len__(self):
        return len(self._parent)

    def __getitem__(self, index):
        return self.slice(index) if isinstance(index, slice) else 10 * self._parent[index]


class Negated(experimental.WindowShuffleMapDataset):
    """A node of somebody's own, which inherits from one of Grain's."""

    def __getitem__(self, index):
        return self.slice(index) if isinstance(index, slice) else -super().__getitem__(index)


class Several(Numbers):
    """A source that reads several examples at once."""

    def _getitems(self, indices):
        return [ROWS[index] for index in indices]


class Hundredfold(Several):
    """A source that inherits from such a one."""

    def __getitem__(self, index):
        return 100 * ROWS[index]


class Wrapped:
    """A source that wraps such a one."""

    def __init__(self):
        self._source = Several()

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return 100 * self._source[index]

    def __getattr__(self, name):
        return getattr(self._source, name)


SOURCES = {
    "array": ROWS,
    "list": list(ROWS),
    "source": Numbers(),
    "several": Several(),
    "inheriting": Hundredfold(),
    "wrapping": Wrapped(),
    "dataset": grain.MapDataset.source(ROWS).map(lambda x: 7 * x),
    "own dataset": Negated(grain.MapDataset.source(ROWS), window_size=13, seed=1).shuffle(seed=2),
}
OVER_SOURCES = {
    "batch": lambda s: s.batch(4),
    "slice": lambda s: s[3:].batch(4),
    "stride": lambda s: s.slice(slice(1, None, 3)).batch(4),
    "shuffle": lambda s: s.shuffle(seed=1).batch(4),
    "window": lambda s: experimental.WindowShuffleMapDataset(s, window_size=13, seed=1).batch(4),
    "shuffle, repeat": lambda s: s.shuffle(seed=1).repeat(3).batch(4),
    "batch, shuffle, repeat": lambda s: s.batch(4).shuffle(seed=1).repeat(3),
    "batch, shuffle once, repeat": lambda s: s.batch(4).shuffle(seed=1).repeat(3, reseed_each_epoch=False),
    "seed, map at random": lambda s: s.seed(3).random_map(lambda x, rng: x + 100 * rng.integers(9)).shuffle().batch(4),
    "index": lambda s: s.shuffle(seed=1).map_with_index(lambda i, x: x + 100 * i).batch(4),
    "concatenate": lambda s: grain.MapDataset.concatenate([s, s[:3], s.map(lambda x: -x)]).batch(4),
    "mix": lambda s: grain.MapDataset.mix([s, s.map(lambda x: -x)], weights=[0.25, 0.75]).batch(4),
    "own node": lambda s: Tenfold(s.shuffle(seed=1)).batch(4),
    "own node from Grain's": lambda s: Negated(s, window_size=13, seed=1).batch(4),
    "zip": lambda s: (
        experimental.ZipMapDataset([s, s.shuffle(seed=2)]).map(lambda pair: pair[0] + 100 * pair[1]).batch(4)
    ),
    "batch by a function": lambda s: s.batch(4, batch_fn=lambda rows: np.stack(rows[::-1])),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", OVER_SOURCES)
def test_examples_read_together_are_those_that_grain_reads_one_by_one(name, source) -> None:
    dataset = OVER_SOURCES[name](grain.MapDataset.source(SOURCES[source]))
    expected = [dataset[i].tolist() for i in range(len(dataset))]
    found = [[x for part in step for x in part] for step in steps_of(Run(lambda context: dataset, 1, 2))]
    assert found == expected


@pytest.mark.parametrize("name", ["batch", "shuffle, repeat", "index"])
def test_what_is_in_memory_is_read_by_one_thread(name) -> None:
    dataset = OVER_SOURCES[name](grain.MapDataset.source(ROWS))
    strategy = replicax.MirroredStrategy(["cpu:0"])
    before = set(threading.enumerate())
    with iter(strategy.distribute_dataset(dataset)) as elements:
        next(elements)
        names = [thread.name for thread in set(threading.enumerate()) - before]
    in_memory = name != "index"  # a function is asked for by several threads, as it may wait for storage
    assert (names == ["replicax-input"]) == in_memory


@pytest.mark.parametrize("source", ["memmap", "arrays", "list of somebody's own"])
def test_what_lies_in_files_is_read_by_several_threads(source, tmp_path) -> None:
    mapped = np.memmap(tmp_path / "rows", np.int32, "w+", shape=(26,))
    strategy = replicax.MirroredStrategy(["cpu:0"])
    dataset = {
        "memmap": lambda: grain.MapDataset.source(mapped),
        "arrays": lambda: strategy.make_numpy_dataset({"x": mapped}),
        "list of somebody's own": lambda: grain.MapDataset.source(type("Stored", (list,), {})(ROWS)),
    }[source]()
    before = set(threading.enumerate())
    with iter(strategy.distribute_dataset(dataset.batch(4))) as elements:
        next(elements)
        assert len(set(threading.enumerate()) - before) > 1


def test_an_error_says_in_which_of_several_datasets_it_was() -> None:
    broken = grain.MapDataset.source(Numbers()).map(lambda x: np.int32(1 // (int(x) - 5)))
    dataset = grain.MapDataset.concatenate([grain.MapDataset.source(ROWS), broken]).batch(4)
    with pytest.raises(ZeroDivisionError) as caught:
        list(replicax.MirroredStrategy(["cpu:0"]).distribute_dataset(dataset))
    assert "dataset_index=1" in caught.value.__notes__[0]


def refused(run, state) -> str:
    try:
        run.restore(state)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", soak_except(GRAPHS, *QUICK))
def test_graphs(name) -> None:
    check_graph(GRAPHS[name], may_refuse=False)


@pytest.mark.parametrize("name", soak_except(FILED, "batch, window", "repeat, batch", "filter, batch", "cache, batch"))
def test_graphs_over_files(name, lines) -> None:
    check_graph(lambda: FILED[name](lines()), may_refuse=name in ("batch, window", "batch, repeat"))


class Rows(BatchedSource):
    """Numbers that are read several at once."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index):
        return np.float32(index)

    def read_several(self, indices):
        return [np.float32(index) for index in indices]


class TenfoldRows(Rows):
    def __getitem__(self, index):
        return 10 * super().__getitem__(index)


def test_a_source_with_a_getitem_of_its_own_is_read_one_by_one() -> None:
    strategy = replicax.MirroredStrategy(["cpu:0"])
    rows, tenfold = (strategy.distribute_dataset(grain.MapDataset.source(s).batch(4)) for s in (Rows(), TenfoldRows()))
    assert [np.asarray(next(iter(dataset))).tolist() for dataset in (rows, tenfold)] == [[0, 1, 2, 3], [0, 10, 20, 30]]


@pytest.mark.parametrize("kind", [FilesIterator, LoaderIterator, ReplayIterator, SequenceIterator])
@pytest.mark.parametrize("begin", [lambda iterator: None, grain.DatasetIterator.__init__], ids=["not begun", "begun"])
def test_an_iterator_whose_constructor_was_interrupted_can_be_closed(begin, kind) -> None:
    iterator = kind.__new__(kind)
    begin(iterator)
    iterator.close()  # as Grain's __del__ does; an error there would be printed
    assert iterator.is_closed


LOADER = grain.DataLoader(data_source=range(4), sampler=grain.samplers.IndexSampler(4, num_epochs=1))
ONE_FILE = [{"files": ["a"], "skip": {}, "state": None}]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ReplayIterator(lambda: iter([np.zeros(2)] * 2)),
        lambda: LoaderIterator(LOADER),
        lambda: SequenceIterator(lambda part: grain.MapDataset.range(4).to_iter_dataset(), ONE_FILE, False),
    ],
)
def test_an_iterator_that_is_closed_has_no_next_element(make) -> None:
    iterator = make()
    next(iterator)
    iterator.close()
    with pytest.raises(ValueError, match="was closed, so there is no next element"):
        next(iterator)
