from __future__ import annotations

import pathlib
import re
from typing import Any

import grain
import numpy as np
import pytest

import replicax
from replicax import InputOptions
from tests.data.simulated import Run

ROWS = [{"id": np.int32(i)} for i in range(12)]


def text(folder: pathlib.Path, name: str, rows: range, end: str = "\n") -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{i}{end}" for i in rows))
    return str(path)


def number(line: str) -> Any:
    return {"id": np.int32(int(line))}


def lines(paths: list[str], ahead: bool = False) -> Any:
    read = replicax.data.text_lines(paths)
    if ahead:
        read = grain.experimental.ThreadPrefetchIterDataset(read, prefetch_buffer_size=2)
    return read.map(number).batch(4)


def examples(rows: Any = ROWS) -> Any:
    return grain.MapDataset.source(rows)


def arrays(rows: Any) -> Any:
    return replicax.MirroredStrategy(["cpu:0"]).make_numpy_dataset({"x": rows}).batch(4)


def generator(rows: int, size: int = 4, shape: tuple[int, ...] = ()) -> Any:
    def batches():
        for start in range(0, rows, size):
            yield np.zeros((min(size, rows - start), *shape), np.float32)

    return batches


def on_workers(makes: list[Any], policy: str = "auto", replicas: int = 2) -> Run:
    options = InputOptions(auto_shard_policy=policy)
    return Run(lambda context: makes[context.input_pipeline_id], len(makes), replicas, options)


@pytest.fixture
def files(tmp_path: pathlib.Path) -> list[str]:
    return [text(tmp_path, f"{i}.txt", range(3 * i, 3 * i + 3)) for i in range(4)]


@pytest.mark.parametrize("policy", ["auto", "file", "data"])
def test_other_files_are_named(files: list[str], tmp_path: pathlib.Path, policy: str) -> None:
    # Files are sorted by their paths, directories included.
    swapped = [text(tmp_path / "a", "1.txt", range(3, 6)), text(tmp_path / "b", "0.txt", range(3)), ""]
    swapped[2:] = [text(tmp_path / "c", f"{i}.txt", range(3 * i, 3 * i + 3)) for i in (2, 3)]
    longer, gone = text(tmp_path / "longer", "2.txt", range(6, 10)), text(tmp_path / "gone", "3.txt", range(9, 12))
    for other, message in [
        (files[:3], r"worker 0 has '3\.txt', and worker 1 has not"),
        (files[:1], r"worker 0 has '1\.txt' and 2 more, and worker 1 has not"),
        ([*files, longer + "s"], r"worker 1 has '2\.txts', and worker 0 has not"),
        (swapped, r"number 0 is '0\.txt' on worker 0, and '1\.txt' on worker 1"),
        ([*files[:2], longer, files[3]], r"'2\.txt' has 6 bytes on worker 0, and 8 bytes on worker 1"),
        ([*files[:3], gone], r"'3\.txt' has 8 bytes on worker 0, and no bytes that can be read on worker 1"),
    ]:
        if other[-1].endswith("s"):
            pathlib.Path(other[-1]).write_text("1\n")
        theirs = lines(other)
        if other[-1] == gone:
            pathlib.Path(gone).unlink()
        with pytest.raises(ValueError, match=rf"test: the workers were given different files: {message}\. All workers"):
            on_workers([lines(files), theirs], policy)


def test_files_of_one_name_in_several_directories_are_compared_by_their_places(tmp_path: pathlib.Path) -> None:
    sizes = {"a": 2, "b": 3, "c": 4, "d": 2}
    a, b, longer, again = (text(tmp_path / folder, "x.txt", range(n)) for folder, n in sizes.items())
    for other, message in [
        ([a], "worker 0 has 2, and worker 1 has 1"),
        ([a, b, longer], "worker 0 has 2, and worker 1 has 3"),
        ([a, longer], r"'x\.txt' has 6 bytes on worker 0, and 8 bytes on worker 1"),
        ([longer, again], r"'x\.txt' has 4 bytes on worker 0, and 8 bytes on worker 1"),
    ]:
        with pytest.raises(ValueError, match=rf"test: the workers were given different files: {message}\. All workers"):
            on_workers([lines([a, b]), lines(other)])


@pytest.mark.parametrize(
    ("makes", "message"),
    [
        (
            [examples().batch(4), examples(ROWS[:8]).batch(4)],
            "number of batches is 3 on worker 0, and 2 on worker 1",
        ),
        ([examples().batch(4), examples().batch(2)], "the number of batches is 3 on worker 0, and 6 on worker 1"),
        (
            [examples().batch(4), examples(ROWS[:11]).batch(4)],
            "{'examples': 12} on worker 0, and {'examples': 11} ",
        ),
        (
            [examples().to_iter_dataset().batch(size) for size in (4, 3)],
            "the number of examples in a batch is 4 on worker 0, and 3 on worker 1",
        ),
        ([[np.zeros(4)] * 3, [np.zeros(4)] * 2], "number of batches is 3 on worker 0, and 2 on worker 1"),
        (
            [[np.zeros(4)], generator(4)],
            "the dataset is 'a list of batches' on worker 0, and 'the generator func",
        ),
        (
            [examples().seed(1).shuffle().batch(4), examples().seed(2).shuffle().batch(4)],
            r"the list of its seeds is \[\('ShuffleMapDataset', \d+\), .* on worker 1",
        ),
        ([examples().batch(4), examples(ROWS[::-1]).batch(4)], "worker 1 has other examples in memory than worker 0"),
        (
            [arrays(np.arange(8.0)), arrays(np.arange(8.0, 0, -1))],
            "worker 1 has other examples in memory than worker 0",
        ),
    ],
)
def test_other_datasets_are_named(makes: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        on_workers(makes)


def test_another_policy_is_named() -> None:
    options = [InputOptions(auto_shard_policy=policy) for policy in ("auto", "data")]
    with pytest.raises(ValueError, match="the policy is 'auto' on worker 0, and 'data' on worker 1"):
        Run(lambda context: examples().batch(4), 2, 1, options)


# --- element by element, where lengths are not known ----------------------------------------------------


@pytest.mark.parametrize(("short", "other"), [(0, 1), (2, 0)])
def test_a_pass_that_ends_earlier_on_one_worker_ends_nowhere_in_silence(short: int, other: int) -> None:
    run = on_workers([generator(8 if worker == short else 12) for worker in range(3)], "data")
    assert len(run.steps(2)) == 2
    message = f"the pass ends before element 2 on worker {short}, but not on worker {other}.* use 'off'"
    with pytest.raises(ValueError, match=message):
        run.each(lambda mine, i: next(run.iterators[i]))
    run.close()


def test_a_file_that_gives_fewer_rows_on_one_worker(files: list[str]) -> None:
    def odd(line: str) -> bool:
        return int(line) < 9

    makes = [
        replicax.data.text_lines(files).map(number).batch(4),
        replicax.data.text_lines(files).filter(odd).map(number).batch(4),
    ]
    run = on_workers(makes, "data")
    with pytest.raises(ValueError, match="element 2 has 4 rows on worker 0, and 1 on worker 1"):
        run.steps()
    run.close()


def test_other_shapes_name_the_workers() -> None:
    run = on_workers([generator(8, shape=(3,)), generator(8, shape=(5,))], "data")
    with pytest.raises(TypeError, match=r"shapes .*: worker 0 has float32\[3\], worker 1 has float32\[5\]"):
        run.steps()
    run.close()


@pytest.mark.parametrize(("policy", "ahead"), [("file", False), ("data", False), ("file", True)])
def test_a_bad_row_names_its_file_and_place(files: list[str], policy: str, ahead: bool) -> None:
    """In the worker's own error, and in what the others are told."""
    path = pathlib.Path(files[1])
    path.write_text("3\nx\n5\n")
    run = on_workers([lines(files, ahead)] * 2, policy)
    found: dict[int, Any] = {}

    def read(mine: Any, i: int) -> None:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            list(run.iterators[i])
        found[i] = caught.value

    run.each(read)
    own = found[1]  # under 'file' the second file is worker 1's
    assert str(own) == "invalid literal for int() with base 10: 'x'" or policy == "data"
    record, after = ("[23]", ", or one soon after it") if ahead else ("2", "")
    place = rf"\(raised by record {record} of '1.txt', counted from 1{after}\)$"
    if policy == "file":
        assert re.match(place, own.__notes__[0])
        assert str(found[0]).startswith("worker 1 could not read element 0: ValueError: invalid literal")
        assert re.search(place, str(found[0]))
    else:
        assert all(any(re.search(place, s) for s in [*getattr(e, "__notes__", []), str(e)]) for e in found.values())
    run.close()


def test_a_bad_example_names_its_number() -> None:
    def fails(row: Any) -> Any:
        if row["id"] == 5:
            raise ValueError("bad")
        return row

    run = on_workers([examples().map(fails).batch(4)], replicas=2)
    with pytest.raises(ValueError, match="bad") as caught:
        run.steps()
    assert caught.value.__notes__[0].startswith("(raised by example 5 of the dataset, counted from 0, in the order")
    run.close()


def test_workers_go_on_from_the_same_state() -> None:
    run = on_workers([examples().batch(4)] * 2)
    run.steps(1)
    first = run.state()
    run.steps(1)
    states = [first, run.state()]
    with pytest.raises(ValueError, match="set_state: worker 1 sets another state than worker 0"):
        run.each(lambda mine, i: run.iterators[i].set_state(states[i]))
    run.close()
