"""Every example is seen once, whatever the source, the policy, and who reads it."""

from __future__ import annotations

import collections

import grain
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from replicax import InputOptions
from replicax.data.batches.global_batches import WHY_EMPTY
from replicax.data.dataset import DistributedDataset
from tests.data.simulated import Run, input_workers
from tests.simulated_workers import run as run_workers
from tests.soaking import soak_except


class Reiterable:
    def __init__(self, batches) -> None:
        self._batches = batches

    def __iter__(self):
        return iter(self._batches)


def batches_of(ids, batch):
    return [{"id": ids[i : i + batch], "x": np.zeros((len(ids[i : i + batch]), 2))} for i in range(0, len(ids), batch)]


def make(source, ids, batch):
    rows = [{"id": i, "x": np.zeros(2)} for i in ids]
    match source:
        case "numbered":
            return grain.MapDataset.source(rows).batch(batch)
        case "shuffled":
            return grain.MapDataset.source(rows).seed(7).shuffle().batch(batch)
        case "mapped":
            return grain.MapDataset.source(rows).batch(batch).map(lambda b: {**b, "y": b["x"] + 1})
        case "iterated":
            return grain.MapDataset.source(rows).to_iter_dataset().batch(batch)
        case "window":
            shuffled = grain.experimental.WindowShuffleIterDataset(
                grain.MapDataset.source(rows).to_iter_dataset(), window_size=13, seed=1
            )
            return shuffled.batch(batch)
        case "loader":
            sampler = grain.samplers.IndexSampler(len(rows), shuffle=True, seed=3, num_epochs=1)
            return grain.DataLoader(data_source=rows, sampler=sampler, operations=[grain.transforms.Batch(batch)])
        case "arrays":
            assert len(ids) % batch == 0
            return {"id": np.reshape(ids, (-1, batch)), "x": np.zeros((len(ids) // batch, batch, 2))}
        case "list":
            return batches_of(ids, batch)
        case "re-iterable":
            return Reiterable(batches_of(ids, batch))
        case "generator":

            def generate():
                yield from batches_of(ids, batch)

            return generate
    raise AssertionError(source)


SOURCES = ["numbered", "shuffled", "mapped", "iterated", "window", "loader", "list", "re-iterable", "generator"]
sizes = st.integers(1, 30)
batch_sizes = st.integers(1, 9)
topologies = st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1), (4, 2), (2, (1, 3)), (3, (2, 1, 1))])
partials = st.sampled_from(["exact", "pad", "drop"])


@pytest.mark.parametrize(
    "source", soak_except(SOURCES, *(s for s in SOURCES if s not in ("mapped", "window", "loader")))
)
@hypothesis.given(size=sizes, batch=batch_sizes, topology=topologies, partial=partials, prefetch=st.integers(0, 2))
def test_data_policy(source, size, batch, topology, partial, prefetch) -> None:
    ids = np.arange(size)
    options = InputOptions(auto_shard_policy="data", partial_batch=partial, prefetch=prefetch)
    run = Run(lambda context: make(source, ids, batch), *topology, options)
    steps = size // batch
    if partial == "drop" and batch > size:
        return  # what a full batch is can't be seen in every source; test_empty looks at this
    seen = run.seen()
    run.close()
    if partial == "drop":
        assert seen.total() == steps * batch == len(seen)
    else:
        assert seen == collections.Counter(range(size))


# Each worker reads all of what is its own, in whichever way.
@pytest.mark.parametrize("source", soak_except(SOURCES, "shuffled", "iterated", "list", "generator"))
@hypothesis.given(
    sizes=st.lists(sizes, min_size=4, max_size=4), batch=st.integers(8, 20), topology=topologies, partial=partials
)
def test_off_policy(source, sizes, batch, topology, partial) -> None:
    own = [np.arange(size) + 100 * worker for worker, size in enumerate(sizes)]
    options = InputOptions(auto_shard_policy="off", partial_batch=partial)
    run = Run(lambda context: make(source, own[context.input_pipeline_id], batch), *topology, options)
    if partial == "drop":
        return
    assert run.seen() == collections.Counter(int(x) for ids in own[: topology[0]] for x in ids)
    run.close()


@hypothesis.given(
    sizes=st.lists(sizes, min_size=4, max_size=4), batch=batch_sizes, topology=topologies, partial=partials
)
def test_from_function(sizes, batch, topology, partial) -> None:
    own = [np.arange(size) + 100 * worker for worker, size in enumerate(sizes)]
    options = InputOptions(partial_batch=partial)
    contexts = []

    def dataset(context):
        contexts.append(context)
        return make("numbered", own[context.input_pipeline_id], batch)

    run = Run(dataset, *topology, options, from_function=True)
    assert sorted(c.input_pipeline_id for c in contexts) == list(range(topology[0]))
    if partial == "drop":
        return
    assert run.seen() == collections.Counter(int(x) for ids in own[: topology[0]] for x in ids)
    run.close()


def test_a_buffer_that_is_filled_again_may_give_rows_to_several_elements() -> None:
    def one_buffer():
        buffer = np.zeros(5, int)
        for start in range(0, 20, 5):
            buffer[:] = np.arange(start, start + 5)
            yield buffer

    run = Run(lambda context: one_buffer, 2, 1, InputOptions(auto_shard_policy="off", prefetch=0))
    rows = run.each(lambda mine, i: [x for element in run.iterators[i] for x in element.parts[0].leaves[0].tolist()])
    assert rows == 2 * [list(range(20))]


# --- workers that differ --------------------------------------------------------------------------------


def failing():
    raise OSError("disk on fire")
    yield


def nothing():
    yield from ()


@pytest.mark.parametrize("from_function", [True, False])
@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"x": np.zeros(4)}, {"y": np.zeros(4)}),
        ({"x": np.zeros(4)}, {"x": np.zeros(4, np.int32)}),
        ({"x": np.zeros(4)}, {"x": np.zeros((4, 2))}),
        (np.zeros(4), [np.zeros(4)]),
    ],
    ids=["structure", "dtype", "rank", "containers"],
)
def test_elements_that_differ_between_workers(mine, theirs, from_function) -> None:
    batches = [[mine], [theirs]]
    options = InputOptions(auto_shard_policy="auto" if from_function else "off")
    run = Run(lambda context: batches[context.input_pipeline_id], 2, 1, options, from_function)
    for errors in run.each(lambda mine, i: [error_of(run.iterators[i]) for _ in range(2)]):
        for error in errors:  # on both workers, again and again
            assert isinstance(error, TypeError)
            assert (
                "element 0 has other structures, dtypes or ranks on some workers than on others: worker 0 has"
                in str(error)
            )


def error_of(iterator):
    try:
        next(iterator)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (
            [[np.zeros(4)], failing],
            ["RuntimeError: worker 1 could not read element 0: OSError: disk on fire", "OSError: disk on fire"],
        ),
        (
            [grain.MapDataset.range(12).batch(size) for size in (4, 6)],
            ["ValueError: the workers' datasets have global batches of different sizes: [4, 6]"] * 2,
        ),
        ([[np.zeros(1)]] * 2, [None] * 2),
        ([nothing] * 2, [f"ValueError: the dataset, the generator function nothing, is empty. {WHY_EMPTY}"] * 2),
    ],
)
def test_a_worker_whose_first_batch_fails_or_has_another_size(sources, expected) -> None:
    options = InputOptions(auto_shard_policy="off")
    workers = input_workers(2, 1)

    def begin(mine):
        dataset = DistributedDataset(sources[mine.index], options, mine, "test")
        try:
            iter(dataset)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    told = run_workers([mine.lockstep.workers for mine in workers], lambda worker: begin(workers[worker.index]))
    assert told == expected
