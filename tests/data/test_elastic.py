"""A pass goes on where it was left, on other workers and replicas, and no example is lost or seen twice."""

from __future__ import annotations

import collections
import json
from typing import Any

import grain
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import replicax
from replicax import InputOptions
from tests.data.simulated import Run, examples, steps_of
from tests.data.test_autoshard import SOURCES, make

ANYWHERE = ["numbered", "shuffled", "mapped", "iterated"]
topologies = st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)])


@pytest.mark.parametrize("source", SOURCES)
@hypothesis.given(data=st.data())
def test_interrupted_and_restored(source, data) -> None:
    size = data.draw(st.integers(1, 40), "size")
    batch = data.draw(st.integers(1, 9), "batch")
    ids = np.arange(size)
    options = InputOptions(
        auto_shard_policy="data",
        partial_batch=data.draw(st.sampled_from(["exact", "pad"]), "partial"),
        prefetch=data.draw(st.integers(0, 3), "prefetch"),
    )
    seen: collections.Counter[int] = collections.Counter()
    state = None
    for _ in range(data.draw(st.integers(1, 3), "interruptions")):
        run = Run(lambda context: make(source, ids, batch), *data.draw(topologies, "topology"), options)
        if state is not None:
            run.restore(state)
        seen += run.seen(data.draw(st.integers(0, 5), "steps"))
        state = json.loads(json.dumps(run.state()))  # plain data
        run.close()
    run = Run(lambda context: make(source, ids, batch), *data.draw(topologies, "topology"), options)
    run.restore(state)
    seen += run.seen()
    run.close()
    assert seen == collections.Counter(range(size))


@pytest.mark.parametrize("source", [*ANYWHERE, "list", "re-iterable", "generator"])
@hypothesis.given(data=st.data())
def test_with_another_batch_size(source, data) -> None:
    size = data.draw(st.integers(1, 40), "size")
    ids = np.arange(size)
    options = InputOptions(auto_shard_policy="data")
    seen: collections.Counter[int] = collections.Counter()
    state = None
    for steps in [*data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=2), "steps"), None]:
        batch = data.draw(st.integers(1, 9), "batch")
        run = Run(lambda context, batch=batch: make(source, ids, batch), *data.draw(topologies, "topology"), options)
        if state is not None:
            run.restore(state)
        seen += run.seen(steps)
        state = run.state()
        run.close()
    assert seen == collections.Counter(range(size))


def halves(batch):
    return [grain.MapDataset.range(start, start + 13).batch(batch) for start in (0, 13)]


def one_by_one(batch):
    return grain.MapDataset.range(26).to_iter_dataset().batch(batch)


BATCHES_IN_AN_ORDER = {
    "mixed": lambda batch: grain.MapDataset.mix(halves(batch)),
    "concatenated": lambda batch: grain.MapDataset.concatenate(halves(batch)),
    "mixed streams": lambda batch: grain.IterDataset.mix([half.to_iter_dataset() for half in halves(batch)]),
    "sliced": lambda batch: grain.MapDataset.range(26).batch(batch)[:],
    "shuffled": lambda batch: grain.experimental.WindowShuffleIterDataset(one_by_one(batch), window_size=3, seed=1),
    "limited": lambda batch: grain.experimental.LimitIterDataset(one_by_one(batch), 100),
}


@pytest.mark.parametrize("name", BATCHES_IN_AN_ORDER)
def test_batches_of_which_only_the_order_is_known_keep_their_size(name) -> None:
    first = Run(lambda context: BATCHES_IN_AN_ORDER[name](4))
    seen = first.seen(2)
    second = Run(lambda context: BATCHES_IN_AN_ORDER[name](6), 1, 2)
    assert "but not with another batch size" in repr(second.datasets[0])
    with pytest.raises(ValueError, match=r"this is the state of another dataset.*batches of"):
        second.restore(first.state())
    third = Run(lambda context: BATCHES_IN_AN_ORDER[name](4), 1, 2)
    third.restore(first.state())
    assert seen + third.seen() == collections.Counter(range(26))


def test_batches_of_a_stream_may_have_another_size() -> None:
    assert "and other batch sizes" in repr(Run(lambda context: one_by_one(4)).datasets[0])


def test_batches_of_no_rows_are_gone_past_like_others() -> None:
    def batches():
        for start, stop in ((0, 4), (4, 4), (4, 8), (8, 8), (8, 12)):
            yield np.arange(start, stop)

    for steps in range(6):
        first = Run(lambda context: batches)
        seen = first.seen(steps)
        second = Run(lambda context: batches)
        second.restore(first.state())
        assert seen + second.seen() == collections.Counter(range(12))


def test_no_element_without_rows_comes_of_batches_without_rows_or_after_the_end() -> None:
    batches = [np.arange(4), np.arange(0), np.arange(4, 6)]
    first, second = (Run(lambda context: batches, 2, 1, InputOptions(auto_shard_policy="off")) for _ in range(2))
    assert [[examples(element) for element in step] for step in first.steps()] == [
        [ids] * 2 for ids in ([0, 1], [2, 3], [4, 5])
    ]
    second.restore(first.state())
    assert second.steps() == []


# --- states that are wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"format": 2},
        {"policy": "by moon"},
        {"streams": []},
        {"streams": [3]},
        {"position": {}, "batch": 4, "streams": [{}]},
    ],
    ids=str,
)
def test_states_that_were_edited(wrong) -> None:
    run = Run(lambda context: grain.MapDataset.range(26).batch(4), 1, 2)
    run.steps(2)
    state = run.state()
    with pytest.raises(ValueError, match="set_state takes what get_state of a DistributedIterator gave, got {"):
        run.restore({**state, **wrong})
    assert run.seen() == collections.Counter(range(8, 26))  # it is as it was


def test_a_state_with_an_endless_part_twice() -> None:
    run = Run(lambda context: grain.MapDataset.range(26).repeat().batch(4))
    state = run.state()
    [part] = state["streams"][0]["parts"]
    state["streams"][0]["parts"] = 2 * [{**part, "start": 1}]
    with pytest.raises(ValueError, match="set_state takes what get_state of a DistributedIterator gave"):
        run.restore(state)


def test_states_of_other_datasets(tmp_path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text("1\n2\n")

    def lines(pattern):
        return replicax.data.text_lines(str(tmp_path / pattern)).map(lambda line: np.int32(int(line))).batch(4)

    datasets = {
        "numbers": grain.MapDataset.range(26).batch(4),
        "fewer numbers": grain.MapDataset.range(20).batch(4),
        "numbers without end": grain.MapDataset.range(26).repeat().batch(4),
        "fewer numbers without end": grain.MapDataset.range(30)[:20].shuffle(seed=1).repeat().batch(4),
        "others without end": grain.MapDataset.range(30).shuffle(seed=1).repeat().batch(4),
        "files": lines("[ab].txt"),
        "other files": lines("[bc].txt"),
        "more files": lines("*.txt"),
        "a list": [np.zeros(4)],
        "a longer list": [np.zeros(4)] * 2,
        "arrays": (np.zeros((3, 4)), np.zeros((3, 4))),
        "longer arrays": (np.zeros((5, 4)), np.zeros((5, 4))),
        "Grain's": grain.MapDataset.mix([grain.MapDataset.range(26).batch(4)]),
    }
    states = {}
    for name, dataset in datasets.items():
        run = Run(lambda context, dataset=dataset: dataset)
        run.steps(0)
        states[name] = run.state()
    for name, dataset in datasets.items():
        for other, state in states.items():
            run = Run(lambda context, dataset=dataset: dataset)
            if name == other:
                run.restore(state)
            else:
                with pytest.raises(ValueError, match="this is the state of another dataset"):
                    run.restore(state)


def test_a_list_that_reads_its_batches_when_it_is_asked_reads_none_before_a_pass() -> None:
    read = []

    class Files(list[str]):
        def __getitem__(self, index: Any) -> Any:
            read.append(super().__getitem__(index))
            return np.ones(4)

    dataset = replicax.MirroredStrategy(["cpu:0"]).distribute_dataset(Files("abc"))
    assert read == []
    assert sum(batch.sum() for batch in dataset) == 12


def test_dropping_goes_by_the_size_of_this_datasets_batches() -> None:
    options = InputOptions(partial_batch="drop")
    first = Run(lambda context: batches_of(4), 1, 2, options)
    first.steps(1)
    second = Run(lambda context: batches_of(3), 1, 1, options)
    second.restore(first.state())
    assert [len(part) for step in steps_of(second) for part in step] == [3, 3]  # after the 2 that are left of a batch


def batches_of(size):
    return [np.arange(i, i + size) for i in range(0, 12, size)]


def written_lines(folder, *files):
    for name, numbers in enumerate(files):
        (folder / f"{name}.txt").write_text("".join(f"{i}\n" for i in numbers))
    lines = replicax.data.text_lines(folder / "*.txt").map(np.int32)
    return lambda size, **options: lines.batch(size, **options).map(lambda batch: batch + 0)


def generator_of(size):
    return lambda: iter(np.arange(48).reshape(-1, size))


@pytest.mark.parametrize("partial", ["drop", "pad"])
@pytest.mark.parametrize("source", ["files", "generator", "from function"])
def test_a_full_batch_has_the_size_of_the_first_batch_that_this_dataset_has(tmp_path, source, partial) -> None:
    sized = written_lines(tmp_path, range(24), range(24, 48)) if source == "files" else generator_of
    workers, from_function = (1, True) if source == "from function" else (2, False)
    seen: collections.Counter[int] = collections.Counter()
    state = None
    for size, steps in ((4, 2), (8, 2), (2, None)):
        run = Run(
            lambda context, size=size: sized(size), workers, 1, InputOptions(partial_batch=partial), from_function
        )
        if state is not None:
            run.restore(state)
        seen += run.seen(steps)
        state = run.state()
        run.close()
    assert seen == collections.Counter(range(48))


def test_the_rest_of_a_pass_is_padded_to_a_full_batch_although_the_first_one_was_not_full(tmp_path) -> None:
    sized = written_lines(tmp_path, range(24), [24])
    options = InputOptions(partial_batch="pad")
    first, second = (Run(lambda context: sized(8), 2, 1, options) for _ in range(2))
    seen = first.seen(1)
    second.restore(first.state())
    assert seen + second.seen() == collections.Counter(range(25))


@pytest.mark.parametrize(("partial", "options"), [("drop", {}), ("exact", {"drop_remainder": True})])
def test_a_worker_that_looks_at_the_form_of_its_batches_drops_the_same_elements_as_the_others(
    tmp_path, partial, options
) -> None:
    sized = written_lines(tmp_path, range(24), range(24, 29))
    run = Run(lambda context: sized(8, **options), 2, 1, InputOptions(partial_batch=partial))
    assert run.datasets[0].element_spec.shape == (4,)
    run.iterators = run.each(lambda mine, i: iter(run.datasets[i]))
    assert [step[0].sizes for step in run.steps()] == [(4, 4)]


@pytest.mark.parametrize("short", [0, 1])
def test_a_first_element_for_which_one_workers_files_are_short_is_dropped(tmp_path, short) -> None:
    files = [range(24), [24]]
    sized = written_lines(tmp_path, files[1 - short], files[short])
    run = Run(lambda context: sized(8), 2, 2, InputOptions(partial_batch="drop"))
    with pytest.raises(ValueError, match="gave no element"):
        run.steps()
    run.close()
    first_rows = Run(lambda context: sized(8).map(lambda batch: batch[:1]), 2, 1, InputOptions(partial_batch="drop"))
    assert [step[0].sizes for step in first_rows.steps()] == [(1, 1)]


def test_workers_go_on_with_datasets_of_their_own_that_differ() -> None:
    def own(context, second=24):
        start, count = (0, 16) if context.input_pipeline_id == 0 else (16, second)
        return grain.MapDataset.range(start, start + count).map(np.int32).batch(8)

    run = Run(own, 2, 1, InputOptions(auto_shard_policy="off"))
    before = run.seen(2)
    state = run.state()
    other = Run(own, 2, 1, InputOptions(auto_shard_policy="off"))
    other.restore(json.loads(json.dumps(state)))
    assert before + other.seen() == collections.Counter(range(40))
    run.close()
    other.close()
    with pytest.raises(ValueError, match="this is the state of another dataset"):
        Run(lambda context: own(context, 23), 2, 1, InputOptions(auto_shard_policy="off")).restore(state)
    with pytest.raises(ValueError, match="worker's dataset is its own, so others can't go on with it"):
        Run(own, 1, 1, InputOptions(auto_shard_policy="data")).restore(state)
