"""States that no pass over the dataset can have come to are refused, and leave the iterator as it was."""

from __future__ import annotations

import copy
import gzip
import json
import re

import grain
import numpy as np
import pytest

import replicax
from replicax.data.reading.remaining_parts import find


def lines(folder, name="a.txt", count=40):
    text = "".join(f"{i}\n" for i in range(count)).encode()
    file = folder / name
    file.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return file


SOURCES = {
    "arrays": lambda s, folder: s.make_numpy_dataset(np.arange(20.0)).batch(4),
    "a list": lambda s, folder: [np.arange(4.0)] * 5,
    "a generator function": lambda s, folder: lambda: iter([np.arange(4.0)] * 5),
    "a stream": lambda s, folder: grain.MapDataset.source(np.arange(20.0)).to_iter_dataset().batch(4),
    "interleaved streams": lambda s, folder: grain.experimental.InterleaveIterDataset(
        [grain.MapDataset.source(np.arange(10.0)).to_iter_dataset()] * 3, cycle_length=2
    ).batch(4),
    "files": lambda s, folder: replicax.data.text_lines(lines(folder)).map(np.float32).batch(4),
}


def begun(dataset, elements=2):
    iterator = iter(dataset)
    for _ in range(elements):
        next(iterator)
    return iterator


@pytest.mark.parametrize("source", SOURCES)
def test_counts_that_are_none(pair, tmp_path, source) -> None:
    dataset = pair.distribute_dataset(SOURCES[source](pair, tmp_path))
    with begun(dataset) as iterator:
        state = json.loads(json.dumps(iterator.get_state()))
        wrong = [("position", n) for n in (-5, "3", None, 2.0, True)] + [("batch", n) for n in (0, -4, 1.5)]
        if source in ("arrays", "a list"):
            wrong.append(("position", 10**9))
        for key, number in wrong:
            problem = rf"the {key} of the state must be an integer (from|of at least) .*, got {re.escape(repr(number))}"
            with pytest.raises(ValueError, match=problem):
                iterator.set_state({**state, key: number})
        with pytest.raises(ValueError, match=r"the rows of a batch in the state must be .*, got -4"):
            iterator.set_state({**state, "streams": [{**state["streams"][0], "rows": -4}]})
        rest, saved = len(list(iterator)), copy.deepcopy(state)  # as if nothing had been asked
        iterator.set_state(state)
        assert len(list(iterator)) == rest
        assert state == saved


@pytest.mark.parametrize(
    ("source", "key", "number", "problem"),
    [
        ("arrays", "native", {"next_index": 6}, "the number of the next batch in the state must be .* from 0 to 5"),
        ("arrays", "native", {"next_index": -1}, "the number of the next batch in the state must be .*, got -1"),
        ("arrays", "native", {}, "the number of the next batch in the state must be .*, got None"),
        ("arrays", "parts", [{"files": None, "start": 0, "stop": 21}], "the end of a part .* from 0 to 20, .* got 21"),
        ("arrays", "parts", [{"files": None, "start": 9, "stop": 8}], "the start of a part .* from 0 to 8, .* got 9"),
        ("a list", "native", {"rows": -1}, "the rows that the state has come past must be .*, got -1"),
    ],
)
def test_places_that_are_none(pair, tmp_path, source, key, number, problem) -> None:
    with begun(pair.distribute_dataset(SOURCES[source](pair, tmp_path))) as iterator:
        state = iterator.get_state()
        wrong = copy.deepcopy(state)
        wrong["streams"][0][key] = number
        with pytest.raises(ValueError, match=problem):
            iterator.set_state(wrong)
        assert iterator.get_state() == state


def test_a_place_that_is_there_twice_is_none() -> None:
    assert find({"a": [{"rows": 1}], "b": [2]}, "rows") == 1
    assert find({"a": [{"rows": 1}], "b": {"rows": 2}}, "rows") is None


def test_a_state_that_is_nested_too_deeply(pair, tmp_path) -> None:
    deep: dict[str, object] = {}
    for _ in range(20_000):
        deep = {"a": deep}
    with begun(pair.distribute_dataset(SOURCES["arrays"](pair, tmp_path))) as iterator:
        state = iterator.get_state()
        for wrong in (deep, {**state, "streams": [{**state["streams"][0], "of": deep}]}):
            with pytest.raises(ValueError, match="set_state takes what get_state of a DistributedIterator gave, got {"):
                iterator.set_state(wrong)
        assert iterator.get_state() == state


def test_more_elements_than_there_are_when_they_were_smaller(pair) -> None:
    rows = np.arange(20, dtype=np.float32)
    with begun(pair.distribute_dataset(list(rows.reshape(10, 2))), 8) as iterator:
        state = iterator.get_state()
    with iter(pair.distribute_dataset(list(rows.reshape(5, 4)))) as iterator:
        iterator.set_state(state)
        [last] = iterator
    np.testing.assert_array_equal(pair.gather(last, 0), rows[16:])


def test_more_elements_than_examples_where_batches_are_repeated(pair) -> None:
    with begun(pair.distribute_dataset(grain.MapDataset.range(20).batch(4).repeat(10)), 30) as iterator:
        iterator.set_state(iterator.get_state())
        assert len(list(iterator)) == 20


def test_a_source_that_has_become_shorter_does_not_look_as_if_it_had_ended(pair) -> None:
    batches = [np.arange(4.0)] * 5
    with begun(pair.distribute_dataset(batches), 4) as iterator:
        state = iterator.get_state()
    with iter(pair.distribute_dataset(lambda: iter(batches[:2]))) as iterator:
        iterator.set_state(state)
        with pytest.raises(ValueError, match="16 rows of this dataset had been given when .* it has only 8 now"):
            next(iterator)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_file_that_has_been_cut_off_is_found_at_once(pair, tmp_path, name) -> None:
    file = lines(tmp_path, name)
    whole = file.read_bytes()
    dataset = pair.distribute_dataset(replicax.data.text_lines(file).map(np.float32).batch(4))
    with begun(dataset) as iterator:
        state = iterator.get_state()
    with begun(dataset, 1) as iterator:
        before = iterator.get_state()
        lines(tmp_path, name, 2)
        with pytest.raises(ValueError, match=rf"{name} ends at byte 4, before byte 16: it has been changed or cut off"):
            iterator.set_state(state)
        assert iterator.get_state() == before
        file.write_bytes(whole)
        iterator.set_state(state)
        assert len(list(iterator)) == 8


def test_the_iterator_of_files_itself(tmp_path) -> None:
    iterator = iter(replicax.data.text_lines(lines(tmp_path)))
    next(iterator)
    state = iterator.get_state()
    for wrong in ({"records": -1}, {"position": {"byte": -2}}, {"counts": ["x"]}):
        with pytest.raises(ValueError, match=r"text_lines: a number of records, or a place, in the state must be"):
            iterator.set_state({**state, **wrong})
    with pytest.raises(ValueError, match=r"ends at byte 110, before byte 1000"):
        iterator.set_state({**state, "position": {"byte": 1000}})
    assert next(iterator) == "1"
