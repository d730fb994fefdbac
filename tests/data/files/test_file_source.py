"""What holds for every format: nothing is lost, and an iterator goes on where another one was."""

from __future__ import annotations

import gc
import json
import pathlib
import tempfile

import absl.flags
import grain
import numpy as np
import pytest
from hypothesis import given, strategies as st

import replicax
from tests.data.files.writing import KINDS, write_all

EVERY_FORMAT = pytest.mark.parametrize("name", KINDS)


def contents(kind):
    return st.lists(st.lists(kind.records, max_size=8), min_size=1, max_size=4)


def files_of(kind, data):
    """Random contents, in files that are there for the length of the test."""
    parts = data.draw(contents(kind))
    folder = tempfile.TemporaryDirectory()
    return parts, write_all(kind, pathlib.Path(folder.name), parts), folder


def flat(parts):
    return [record for part in parts for record in part]


@EVERY_FORMAT
@given(data=st.data())
def test_what_was_written_is_read(name, data) -> None:
    parts, files, folder = files_of(KINDS[name], data)
    with folder:
        dataset = KINDS[name].read(files)
        assert list(dataset) == flat(parts)
        assert list(dataset) == flat(parts)  # again from the beginning
        assert dataset.files == tuple(files)


@EVERY_FORMAT
@given(data=st.data())
def test_a_restored_iterator_goes_on(name, data) -> None:
    parts, files, folder = files_of(KINDS[name], data)
    with folder:
        records = flat(parts)
        dataset = KINDS[name].read(files)
        iterator = iter(dataset)
        at = data.draw(st.integers(0, len(records)))
        assert [next(iterator) for _ in range(at)] == records[:at]
        state = json.loads(json.dumps(iterator.get_state()))
        assert state == iterator.get_state()
        assert list(iterator) == records[at:]
        restored = iter(KINDS[name].read(files))
        for _ in range(data.draw(st.integers(0, len(records)))):
            next(restored)  # wherever it has been before
        restored.set_state(state)
        assert restored.get_state() == state
        assert list(restored) == records[at:]
        iterator.set_state(state)  # also the iterator itself, which is at its end
        assert list(iterator) == records[at:]


@EVERY_FORMAT
@given(data=st.data())
def test_other_workers_go_on(name, data) -> None:
    """One reads a while; its files and positions are then divided over two others."""
    parts, files, folder = files_of(KINDS[name], data)
    with folder:
        dataset = KINDS[name].read(files)
        iterator = iter(dataset)
        at = data.draw(st.integers(0, len(flat(parts))))
        for _ in range(at):
            next(iterator)
        state = iterator.get_state()
        positions = dataset.positions(state)
        assert sum(positions.values()) == at
        assert list(positions) == files
        finished = dataset.finished(state)
        assert all(positions[file] == len(part) for file, part in zip(files, parts, strict=True) if file in finished)
        for half in (files[::2], files[1::2]):
            rest = [r for f, part in zip(files, parts, strict=True) if f in half for r in part[positions[f] :]]
            other = dataset.with_files(half).with_positions(positions)
            assert list(other) == rest
            assert list(dataset.with_positions(positions).with_files(half)) == rest
            # Its own states count what was read before, and can be divided again.
            again = iter(other)
            taken = data.draw(st.integers(0, len(rest)))
            for _ in range(taken):
                next(again)
            reached = other.positions(again.get_state())
            plain = iter(dataset.with_files(half))  # which knows nothing of what was left out
            plain.set_state(json.loads(json.dumps(again.get_state())))
            assert list(plain) == rest[taken:]
            assert sum(reached.values()) == taken + sum(positions[f] for f in half)
            assert list(dataset.with_files(half).with_positions(reached)) == rest[taken:]


@EVERY_FORMAT
def test_the_place_after_records_that_are_left_out(name, tmp_path) -> None:
    kind, records = KINDS[name], _some(name)
    [file] = write_all(kind, tmp_path, [records])
    iterator = iter(kind.read(file).with_positions({file: 5}))
    iterator.set_state(iterator.get_state())  # which opens the file, and reads none of the rest
    plain = iter(kind.read(file))
    plain.set_state(iterator.get_state())
    assert list(plain) == records[5:]


@EVERY_FORMAT
def test_grain_checks_the_states_of_all_that_comes_after(name, tmp_path) -> None:
    kind = KINDS[name]
    records = _some(name)
    files = write_all(kind, tmp_path, [records[:5], [], records[5:]])
    dataset = kind.read(files).map(lambda record: np.asarray(len(str(record)))).batch(3)
    grain.experimental.assert_equal_output_after_checkpoint(dataset)


def _some(name):
    if name.startswith("text"):
        return [f"line {i}" for i in range(11)]
    if name.startswith("tf"):
        return [b"record" * i for i in range(11)]
    return [{"i": i, "x": i / 2, "s": f"a\n{i}"} for i in range(11)]


@EVERY_FORMAT
def test_threads_and_processes_of_grain(name, tmp_path) -> None:
    kind = KINDS[name]
    files = write_all(kind, tmp_path, [_some(name)[:4], _some(name)[4:7], _some(name)[7:]])
    dataset = kind.read(files).map(str)
    expected = [str(record) for record in kind.read(files)]
    threads = grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=3)
    assert list(threads) == expected
    grain.experimental.assert_equal_output_after_checkpoint(threads)
    several = grain.experimental.multithread_prefetch(dataset, num_threads=2, buffer_size=2)
    assert sorted(several) == sorted(expected)


@pytest.mark.soak
def test_processes_divide_the_files(tmp_path) -> None:
    absl.flags.FLAGS.mark_as_parsed()  # as absl.app.run does; Grain's processes ask for flags
    files = write_all(KINDS["text"], tmp_path, [[f"{i}.{j}" for j in range(3)] for i in range(3)])
    dataset = replicax.data.text_lines(files).mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
    iterator = iter(dataset)
    got = list(iterator)
    iterator.close()
    assert sorted(got) == sorted(replicax.data.text_lines(files))


@pytest.mark.usefixtures("young_heap")
@EVERY_FORMAT
def test_no_file_stays_open(name, tmp_path) -> None:
    # A file that is left to the garbage collector is a ResourceWarning, and so an error.
    kind = KINDS[name]
    files = write_all(kind, tmp_path, [_some(name), _some(name)])
    iterator = iter(kind.read(files))
    next(iterator)
    iterator.close()
    iterator.close()
    with pytest.raises(ValueError, match="closed"):
        next(iterator)
    dropped = iter(kind.read(files))
    next(dropped)
    del dropped
    gc.collect()
    open_files = [link for link in pathlib.Path("/proc/self/fd").iterdir() if str(tmp_path) in str(_target(link))]
    assert open_files == []


def _target(link):
    try:
        return link.readlink()
    except OSError:
        return ""


@EVERY_FORMAT
def test_files_that_got_shorter(name, tmp_path) -> None:
    kind = KINDS[name]
    [file] = write_all(kind, tmp_path, [_some(name)])
    dataset = kind.read(file)
    with pytest.raises(ValueError, match=r"12 records of this file had been read .* only 11 now|only 11 now"):
        next(iter(dataset.with_positions({file: 12})))
    assert list(dataset.with_positions({file: 11})) == []
    iterator = iter(dataset)
    for _ in range(9):
        next(iterator)
    state = iterator.get_state()
    kind.write(pathlib.Path(file), _some(name)[:3])
    restored = iter(kind.read(file))
    with pytest.raises(ValueError, match="part-000"):
        restored.set_state(state)
    assert list(restored) == _some(name)[:3]  # it is where it was
    pathlib.Path(file).write_bytes(b"")
    with pytest.raises(ValueError, match="part-000"):
        iter(dataset).set_state(state)
    with pytest.raises(ValueError, match=r"part-000.* 9 records of this file had been read .* only 0 now"):
        list(dataset.with_positions({file: 9}))


def test_states_of_other_datasets(tmp_path) -> None:
    files = write_all(KINDS["text"], tmp_path, [["a", "b"], ["c"]])
    iterator = iter(replicax.data.text_lines(files))
    list(iterator)
    assert str(replicax.data.text_lines(files)) == str(iterator) == "text_lines(2 files)"
    with pytest.raises(ValueError, match=r"over 2 files, where number 2 was ''; this one is over 1 files"):
        iter(replicax.data.text_lines(files[0])).set_state(iterator.get_state())
    state = iter(replicax.data.text_lines(files[1])).get_state()
    with pytest.raises(ValueError, match=r"number 0 was 'part-001.txt'; .* there it is 'part-000.txt'"):
        iter(replicax.data.text_lines(files[0])).set_state(state)


def test_the_directory_may_be_another_one(tmp_path) -> None:
    (tmp_path / "a").mkdir()
    write_all(KINDS["text"], tmp_path / "a", [["a", "b"], ["c"]])
    iterator = iter(replicax.data.text_lines(tmp_path / "a/*"))
    next(iterator)
    state = iterator.get_state()
    del iterator
    (tmp_path / "a").rename(tmp_path / "b")
    moved = iter(replicax.data.text_lines(tmp_path / "b/*"))
    moved.set_state(state)
    assert list(moved) == ["b", "c"]


@pytest.mark.parametrize("number", [-1, 1.5, None])
def test_positions_are_numbers(tmp_path, number) -> None:
    [file] = write_all(KINDS["text"], tmp_path, [["a"]])
    with pytest.raises(ValueError, match="integers of at least 0"):
        replicax.data.text_lines(file).with_positions({file: number})
