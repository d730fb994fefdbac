"""Input of real worker processes."""

from __future__ import annotations

import collections
import itertools

import pytest

import replicax
from replicax.data.batches.agreed_batches import MOST_AHEAD
from tests import processes
from tests.data import workers_input
from tests.data.workers_input import local_ids, sources

SIZE, BATCH = 26, 8
IN_ORDER, OF_ALL = ("iterated", "generator"), (("data", "exact"), ("data", "pad"))
SOURCES = ("numbered", "iterated", "generator", "files")
ALL = list(itertools.product(SOURCES, ("auto", "data", "off"), ("exact", "pad", "drop")))
QUICK = [
    ("numbered", "auto", "exact"),
    ("generator", "data", "pad"),
    ("iterated", "auto", "drop"),
    ("files", "off", "exact"),
]
"""Sources, policies of sharing them out, and what becomes of a batch that is not full."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers")
    bounds = [0, 3, 14, 14, 21, SIZE]
    paths = []
    for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
        path = folder / f"{i}.txt"
        path.write_text("".join(f"{n}\n" for n in range(start, stop)))
        paths.append(str(path))
    return paths


@pytest.fixture(scope="module", params=[QUICK, pytest.param(ALL, marks=pytest.mark.soak)], ids=["a few", "all"])
def cases(request):
    return request.param


@pytest.fixture(scope="module")
def results(files, cases):
    return processes.run(workers_input.everything, files, SIZE, BATCH, cases, workers=2, devices=2, timeout=120)


def test_every_example_once(results, cases) -> None:
    for name, policy, partial in cases:
        check_an_epoch([result["epochs"][name, policy, partial] for result in results], policy, partial)


def check_an_epoch(workers, policy, partial) -> None:
    assert workers[0][1] == workers[1][1]  # they computed the same means
    assert all(max(ways) - min(ways) < 1e-5 for ways in workers[0][1])
    if partial != "exact":
        assert all(traces <= 1 for _, _, traces in workers)  # 0 where another dataset has had the same shapes
    seen = collections.Counter(i for ids, *_ in workers for i in ids)
    times = 2 if policy == "off" else 1  # there each worker was given all of it
    everyone = collections.Counter(dict.fromkeys(range(SIZE), times))
    if partial != "drop":
        assert seen == everyone
    else:
        assert seen <= everyone
        assert seen.total() == len(workers[0][1]) * BATCH


def test_means_are_over_what_there_is(results, cases) -> None:
    found = [results[0]["epochs"][case][1] for case in cases if case[0] in IN_ORDER and case[1:] in OF_ALL]
    assert found
    assert all(means == [[mean] * 4 for mean in (3.5, 11.5, 19.5, 24.5)] for means in found)


def test_a_padded_batch_on_both_executors(results) -> None:
    owned = [[[0.0, 2.0], [4.0, 6.0]], [[8.0], []]]
    for result, own in zip(results, owned, strict=True):
        assert result["padded"] == ([(4.0, [0.0, 2.0, 4.0, 6.0, 8.0], own)] * 2, 2.0)


def test_values_have_one_structure_on_all_workers(results) -> None:
    for result in results:
        assert "structure of a value: worker" in result["structures"]
        assert "{'w0': *}" in result["structures"]
        assert "{'w1': *}" in result["structures"]


def test_each_worker_made_its_own_dataset(results) -> None:
    told = [result["from_function"][0] for result in results]
    assert told == [[replicax.InputContext(2, i, 4)] for i in range(2)]
    ids = [sorted(result["from_function"][1]) for result in results]
    assert ids == [list(range(0, SIZE, 2)), list(range(1, SIZE, 2))]


@pytest.mark.covering(1)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_streams_of_their_own_are_agreed_on_with_few_exchanges(workers, prefetch) -> None:
    count = 40
    told = processes.run(workers_input.agreed, prefetch, count, workers=workers, devices=1)
    for index, (sizes, exchanges, error) in enumerate(told):
        assert sizes == [4] * (count - index) + [0] * index
        # A few while the streams are not read ahead yet; then one is about all that is ready, or all but one.
        assert exchanges <= 3 + -(-count // (MOST_AHEAD - 1)) if prefetch else exchanges == count + 1
        other = f"RuntimeError: worker {workers - 1} could not read element 2: "
        assert error == ("" if index == workers - 1 else other) + "OSError: disk on fire"


@pytest.mark.parametrize("name", SOURCES)
def test_two_workers_begin_and_one_goes_on(results, files, name) -> None:
    states = [result["interrupted"][name][0] for result in results]
    assert states[0] == states[1]
    before = collections.Counter(i for result in results for i in result["interrupted"][name][1])
    strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    with iter(strategy.distribute_dataset(sources(files, BATCH, SIZE)[name]())) as iterator:
        iterator.set_state(states[0])
        after = collections.Counter(i for element in iterator for i in local_ids(strategy, element))
    assert before + after == collections.Counter(range(SIZE))


def test_one_worker_begins_and_two_go_on(files) -> None:
    strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    states, before = {}, {}
    for name, make in sources(files, BATCH, SIZE).items():
        with iter(strategy.distribute_dataset(make())) as iterator:
            before[name] = local_ids(strategy, next(iterator))
            states[name] = iterator.get_state()
    workers = processes.run(workers_input.continued, files, BATCH, SIZE, states, workers=2, devices=1, timeout=120)
    for name in states:
        seen = collections.Counter([*before[name], *(i for worker in workers for i in worker[name])])
        assert seen == collections.Counter(range(SIZE))
    processes.run(workers_input.left_early, files, workers=2, devices=1, fresh=True)
