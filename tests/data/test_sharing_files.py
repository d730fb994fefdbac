"""Files: whole ones for each worker, and what is left of them for other workers."""

from __future__ import annotations

import collections
import json
import re

import grain
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import replicax
from replicax import InputOptions
from tests.data.files.writing import write_array_records, write_tfrecords
from tests.data.simulated import Run, examples
from tests.soaking import soak_except

topologies = st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)])
file_sizes = st.lists(st.integers(0, 12), min_size=4, max_size=7)


def written(folder, kind, sizes):
    """Files with records that are numbers, all different; the paths."""
    paths, first = [], 0
    for number, size in enumerate(sizes):
        ids = [str(i) for i in range(first, first + size)]
        path = folder / f"{number:02}.{kind}"
        match kind:
            case "txt":
                path.write_text("".join(i + "\n" for i in ids))
            case "csv":
                path.write_text("id\n" + "".join(i + "\n" for i in ids))
            case "tfrecord":
                write_tfrecords(path, [i.encode() for i in ids])
            case "array_record":
                write_array_records(path, [i.encode() for i in ids])
        paths.append(path)
        first += size
    return paths


def number(record):
    return {"id": int(record["id"] if isinstance(record, dict) else record)}


def window(dataset):
    return grain.experimental.WindowShuffleIterDataset(dataset, window_size=12, seed=5)


PIPELINES = {
    "text": ("txt", lambda files, b: replicax.data.text_lines(files).map(number).batch(b)),
    "csv": ("csv", lambda files, b: replicax.data.csv_rows(files).map(number).batch(b)),
    "tfrecord": ("tfrecord", lambda files, b: replicax.data.tfrecords(files).map(number).batch(b)),
    "filtered": ("txt", lambda files, b: replicax.data.text_lines(files).map(number).filter(lambda r: True).batch(b)),
    "mapped after": (
        "txt",
        lambda files, b: replicax.data.text_lines(files).map(number).batch(b).map(lambda x: dict(x)),
    ),
    "window": ("txt", lambda files, b: window(replicax.data.text_lines(files).map(number)).batch(b)),
    "records": ("array_record", lambda files, b: replicax.data.array_records(files).map(number).batch(b)),
    "shuffled": (
        "array_record",
        lambda files, b: replicax.data.array_records(files).seed(1).shuffle().map(number).batch(b),
    ),
    "filtered records": (
        "array_record",
        lambda files, b: (
            replicax.data.array_records(files).map(number).to_iter_dataset().filter(lambda r: True).batch(b)
        ),
    ),
}


QUICK = ("text", "mapped after", "records", "filtered records")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(kind, sizes):
        key = kind, tuple(sizes)
        if key not in made:
            made[key] = written(tmp_path_factory.mktemp(kind), kind, sizes)
        return made[key]

    return folder


@pytest.mark.parametrize("pipeline", soak_except(PIPELINES, *QUICK))
@hypothesis.given(data=st.data())
def test_each_record_once(folders, pipeline, data) -> None:
    kind, make = PIPELINES[pipeline]
    sizes = data.draw(file_sizes, "sizes")
    hypothesis.assume(sum(sizes))
    files = folders(kind, sizes)
    batch = data.draw(st.integers(4, 9), "batch")
    options = InputOptions(
        auto_shard_policy=data.draw(st.sampled_from(["auto", "file", "data"]), "policy"),
        partial_batch=data.draw(st.sampled_from(["exact", "pad"]), "partial"),
    )
    run = Run(lambda context: make(files, batch), *data.draw(topologies, "topology"), options)
    assert run.seen() == collections.Counter(range(sum(sizes)))
    run.close()


@pytest.mark.parametrize("pipeline", soak_except(PIPELINES, *QUICK))
@hypothesis.given(data=st.data())
def test_interrupted_and_restored(folders, pipeline, data) -> None:
    kind, make = PIPELINES[pipeline]
    sizes = data.draw(file_sizes, "sizes")
    hypothesis.assume(sum(sizes))
    files = folders(kind, sizes)
    seen: collections.Counter[int] = collections.Counter()
    state = None
    for last in [False] * data.draw(st.integers(1, 2), "interruptions") + [True]:
        options = InputOptions(
            auto_shard_policy=data.draw(st.sampled_from(["auto", "data"]), "policy"),
            prefetch=data.draw(st.integers(0, 3), "prefetch"),
        )
        batch = data.draw(st.integers(4, 9), "batch")
        run = Run(lambda context, b=batch: make(files, b), *data.draw(topologies, "topology"), options)
        if state is not None:
            run.restore(state)
        seen += run.seen(None if last else data.draw(st.integers(0, 4), "steps"))
        state = json.loads(json.dumps(run.state()))
        run.close()
    assert seen == collections.Counter(range(sum(sizes)))


def test_the_files_that_are_left_are_divided_among_all_workers(folders) -> None:
    files = folders("txt", [4, 4, 4, 4])
    first, second = (
        Run(lambda context: replicax.data.text_lines(files).map(number).batch(4), workers) for workers in (1, 2)
    )
    first.steps(1)
    second.restore(first.state())
    assert [[len(examples(element)) for element in step] for step in second.steps(2)] == [[2, 2], [2, 2]]


def test_a_file_goes_on_after_the_only_record_that_was_read_of_it(folders) -> None:
    files = folders("txt", [4, 4])
    first, second = (
        Run(lambda context: replicax.data.text_lines(files).map(number).batch(5), workers) for workers in (1, 2)
    )
    seen = first.seen(1)
    second.restore(first.state())
    assert seen + second.seen() == collections.Counter(range(8))


@pytest.mark.parametrize(("partial", "expected"), [("drop", [(4, 4)]), ("pad", [(2, 4), (4, 4)])])
def test_a_first_batch_of_fewer_examples_says_nothing_of_full_ones(folders, partial, expected) -> None:
    files = folders("txt", [16, 16])
    options = InputOptions(auto_shard_policy="file", partial_batch=partial)
    batches = replicax.data.text_lines(files).map(int).batch(8)
    run = Run(lambda context: batches.map(lambda ids: ids[ids >= 2]), 2, 1, options)
    assert [first.sizes for first, _ in run.steps(len(expected))] == expected


NAMES = {"different names": ["0", "1", "2", "3"], "names of which two are the same": ["a/0", "a/1", "b/0", "b/1"]}


@pytest.mark.covering(2)
@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("policy", ["file", "data"])
@pytest.mark.parametrize("pipeline", ["text", "filtered records", "shuffled"])
def test_files_may_lie_in_other_directories_on_each_worker_and_later(tmp_path, pipeline, policy, names) -> None:
    kind, make = PIPELINES[pipeline]
    disks = []
    for disk in range(3):
        (tmp_path / f"{disk}").mkdir()
        paths = written(tmp_path / f"{disk}", kind, [4, 4, 4, 4])
        targets = [tmp_path / f"{disk}" / f"{name}.{kind}" for name in NAMES[names]]
        for path, target in zip(paths, targets, strict=True):
            target.parent.mkdir(exist_ok=True)
            path.rename(target)
        disks.append(targets)

    def run(workers, first_disk):
        options = InputOptions(auto_shard_policy=policy)
        return Run(lambda context: make(disks[first_disk + context.input_pipeline_id], 4), workers, 1, options)

    first, second, third = run(2, 0), run(2, 1), run(1, 2)
    seen = first.seen(2)
    state = first.state()
    for later in (second, third):
        later.restore(state)
        assert seen + later.seen() == collections.Counter(range(16))


def test_of_records_that_are_batches_several_workers_leave_a_rest_that_others_can_not_take_over(folders) -> None:
    files = folders("txt", [4, 4, 4, 4])
    one, two, same = (
        Run(lambda _: replicax.data.text_lines(files).map(lambda line: np.full(5, int(line))), workers, 1, options)
        for workers, options in ((1, None), (2, None), (2, InputOptions(auto_shard_policy="data")))
    )
    assert "resume with any number of workers and replicas, and other batch sizes" in repr(same.datasets[0])
    assert "resume with any number of workers and replicas, and other batch sizes" in repr(one.datasets[0])
    assert "resume with as many workers only: the rest of a batch is left over" in repr(two.datasets[0])
    one.steps(1)
    two.restore(one.state())
    two.steps(1)
    with pytest.raises(ValueError, match="the rest of a batch is left over, which no other worker can take over"):
        one.restore(two.state())


FIRST_TEN = {
    "array_record": lambda files: replicax.data.array_records(files).map(number)[:10],
    "txt": lambda files: grain.experimental.LimitIterDataset(replicax.data.text_lines(files).map(number), 10),
}


@pytest.mark.parametrize("kind", FIRST_TEN)
def test_a_part_of_all_files_is_not_a_part_of_each_workers_files(folders, kind) -> None:
    files = folders(kind, [4, 4, 4, 4])
    run = Run(lambda context: FIRST_TEN[kind](files).batch(4), 2, 1)
    assert run.seen() == collections.Counter(range(10))


BATCHES_OF_FOUR = {
    "array_record": lambda files: replicax.data.array_records(files).map(number).batch(4).to_iter_dataset(),
    "txt": lambda files: replicax.data.text_lines(files).map(number).batch(4),
}


@pytest.mark.parametrize("kind", BATCHES_OF_FOUR)
def test_workers_read_no_files_of_their_own_if_batches_are_batched_again(folders, kind) -> None:
    files = folders(kind, [4, 4, 4, 4])
    for workers in (1, 2):
        run = Run(lambda context: grain.experimental.RebatchIterDataset(BATCHES_OF_FOUR[kind](files), 6), workers)
        assert [sum(len(examples(element)) for element in step) for step in run.steps()] == [6, 6, 4]


ENDLESS = {
    "array_record": lambda files: replicax.data.array_records(files).seed(1).shuffle().repeat().map(number),
    "txt": lambda files: grain.experimental.RepeatIterDataset(replicax.data.text_lines(files).map(number)),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_workers_read_no_files_of_their_own_if_the_records_repeat_without_end(folders, kind) -> None:
    """They would never end, so a worker that goes on with those of two others would stay in the first."""
    files = folders(kind, [8, 8, 8, 0])
    first, second = (Run(lambda context: ENDLESS[kind](files).batch(6), workers) for workers in (2, 1))
    assert re.search(
        r"DATA \(AUTO: Repeat\w+\(num_epochs=None\) can't be divided by files\)", str(first.datasets[0].plan())
    )
    seen = first.seen(3)
    second.restore(first.state())
    assert seen + second.seen(5) == collections.Counter(2 * list(range(24)))
    with pytest.raises(ValueError, match=r"but Repeat\w+\(num_epochs=None\) can't be divided by files"):
        Run(lambda context: ENDLESS[kind](files).batch(6), 2, 1, InputOptions("file"))


def test_too_few_files(folders) -> None:
    files = folders("txt", [3, 3])
    with pytest.raises(ValueError, match=r"each of 4 workers at least one file, but there are 2 file\(s\)"):
        Run(lambda context: replicax.data.text_lines(files).map(number).batch(4), 4, 1, InputOptions("file"))
    with pytest.raises(ValueError, match="at least one file, but the source does not consist of files"):
        Run(lambda context: [[1, 2]], 2, 1, InputOptions("file"))
    run = Run(lambda context: replicax.data.text_lines(files).map(number).batch(4), 4, 1)
    assert run.seen() == collections.Counter(range(6))
    assert "DATA (AUTO: 2 file(s) are too few for 4 workers)" in str(run.datasets[0].plan())


def test_the_plan_names_the_files_of_each_worker(folders, capsys) -> None:
    files = folders("txt", [3, 3, 3])
    run = Run(lambda context: replicax.data.text_lines(files).map(number).batch(4), 2, 2)
    plan = run.datasets[0].plan()
    assert capsys.readouterr().out == f"{plan}\n"
    assert plan.policy is replicax.data.AutoShardPolicy.FILE
    assert [worker.files for worker in plan.workers] == [(str(files[0]), str(files[2])), (str(files[1]),)]
    assert "worker 1 reads 1 of 3 file(s)" in str(plan)
    assert "replica 2 gets rows 0 to 0 of each 2 of the worker's" in str(plan)


def test_batches_of_one_row_are_shared_by_workers_with_batches_of_their_own() -> None:
    def own(context):
        return [np.array([10 * context.input_pipeline_id + i]) for i in range(3)]

    run = Run(own, 2, 1, InputOptions("off"))
    assert run.seen() == dict.fromkeys([0, 1, 2, 10, 11, 12], 1)
    assert "worker 1 reads its own dataset" in str(run.datasets[0].plan())
    run.close()


def test_the_plan_says_whether_a_worker_reads_the_rows_of_others() -> None:
    rows = replicax.MirroredStrategy(["cpu:0"]).make_numpy_dataset(np.arange(8)).batch(4)
    for dataset, reads in (
        (rows, "its own rows of each batch"),
        ([np.arange(1)] * 2, "all batches, and keeps its own rows"),
    ):
        run = Run(lambda context, dataset=dataset: dataset, 2, 1)
        assert [worker.reads for worker in run.datasets[0].plan().workers] == [reads] * 2
        run.close()
    assert "replica 1 gets nothing" in str(run.datasets[0].plan())


def test_an_unreadable_record_is_told_to_all_workers(tmp_path) -> None:
    good, bad = tmp_path / "a.txt", tmp_path / "b.txt"
    good.write_text("1\n2\n3\n4\n")
    bad.write_text("5\nsix\n7\n8\n")
    run = Run(lambda context: replicax.data.text_lines([good, bad]).map(number).batch(2), 2, 1)

    def failure(mine, i):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            list(run.iterators[i])
        return caught.value

    first, second = run.each(failure)
    assert "invalid literal for int" in str(second)
    assert str(first).startswith("worker 1 could not read element 1: ValueError: invalid literal for int")


def test_batches_too_small_for_files_of_their_own(tmp_path) -> None:
    paths = written(tmp_path, "txt", [3, 3, 3])
    run = Run(lambda context: replicax.data.text_lines(paths).map(number).batch(2), 3, 1)
    assert run.datasets[0].plan().policy is replicax.data.AutoShardPolicy.DATA
    assert run.seen() == collections.Counter(range(9))
    with pytest.raises(ValueError, match="a batch of 2 is too small for 3 workers"):
        Run(lambda context: replicax.data.text_lines(paths).map(number).batch(2), 3, 1, InputOptions("file"))


@pytest.mark.parametrize(
    ("batch", "sizes"), [(5, (2, 1, 1, 1)), (6, (2, 1, 2, 1)), (7, (2, 2, 2, 1)), (8, (2, 2, 2, 2))]
)
def test_the_first_workers_have_the_larger_batches_of_their_own(tmp_path, batch: int, sizes: tuple[int, ...]) -> None:
    """As the first replicas have of a batch that all workers share."""
    paths = written(tmp_path, "txt", [8, 8])
    run = Run(lambda context: replicax.data.text_lines(paths).map(number).batch(batch), 2, 2, InputOptions("file"))
    [step] = run.steps(1)
    assert step[0].sizes == sizes
    run.close()
