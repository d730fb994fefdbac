"""Elements on which workers agree: several in an exchange, and as if there were an exchange for each."""

from __future__ import annotations

import dataclasses
import itertools
import threading

import grain
import jax
import numpy as np
import pytest

from replicax import InputOptions
from replicax.data.batches import agreed_batches
from tests.data.simulated import Run, examples
from tests.soaking import soak_except
from tests.sources import Stream, wait_until

AHEAD = agreed_batches.MOST_AHEAD
KINDS = {"one stream": ("data", False), "own streams": ("off", False), "a function": ("auto", True)}


class Workers(Run):
    """A dataset on several workers, each of which reads a stream of its own; counts the exchanges."""

    def __init__(self, streams, kind, replicas=1, timeout=20.0, **options) -> None:
        policy, from_function = KINDS[kind]
        self.streams = streams
        options = InputOptions(auto_shard_policy=policy, **options)
        make = lambda context: streams[context.input_pipeline_id]  # noqa: E731
        super().__init__(make, len(streams), replicas, options, from_function, timeout)
        self.prefetch = options.prefetch
        # Of a worker's own stream each batch is for all replicas of all workers: it makes so many elements.
        self.elements = len(streams) if kind == "own streams" else 1
        self.numbers = []
        board = self.everyone[0].lockstep.workers.board
        exchange = board.exchange

        def counted(topic, data, timeout, is_cancelled, index, count):
            if index == 0 and ", element/" in topic:
                self.numbers.append(int(topic.split("/")[-1]))
            return exchange(topic, data, timeout, is_cancelled, index, count)

        board.exchange = counted

    def wait(self, given) -> None:
        """Until all streams are read as far ahead as they may be, when so many elements have been given."""
        for stream in self.streams:
            self.wait_for(stream, given)

    def wait_for(self, stream, given) -> None:
        """The same, of one stream."""
        elements = given + (self.prefetch + AHEAD if self.prefetch else 0)
        made = min(len(stream.batches), -(-elements // self.elements))
        wait_until(lambda: stream.made == made)

    def next(self):
        """The next element of all workers; or what each of them raises."""

        def one(mine, i):
            try:
                return next(self.iterators[i])
            except Exception as error:
                return error

        return self.each(one)


def batches(*sizes, start=0):
    bounds = list(itertools.accumulate(sizes, initial=start))
    return [np.arange(a, b, dtype=np.float32) for a, b in itertools.pairwise(bounds)]


def are_elements(given) -> bool:
    return not any(isinstance(element, Exception) for element in given)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exchange_is_about_all_that_is_ready(kind, workers) -> None:
    run = Workers([Stream(batches(*[4 * workers] * 100)) for _ in range(workers)], kind)
    count = 100 * run.elements
    for given in range(1, count + 1):
        assert are_elements(run.next())
        run.wait(given)
    assert [type(error) for error in run.next()] == [StopIteration] * workers
    # Until the streams have been read ahead an exchange may be about one element; later on one is missing, if any.
    assert len(run.numbers) <= 3 + -(-count // (AHEAD - 1))
    run.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_stream_is_not_kept_waiting_for_more_of_it(kind) -> None:
    """A batch comes when the elements before it have been given; who waits for two of them gets none."""
    run = Workers([Stream(batches(4, 4, 4, 4)) for _ in range(2)], kind)
    for stream in run.streams:
        stream.allowed = threading.Semaphore(0)
    for _ in range(4):
        for stream in run.streams:
            stream.allowed.release()
        for _ in range(run.elements):
            assert are_elements(run.next())
    run.close()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_stream_beside_a_quick_one(kind, fails) -> None:
    """The quick one has told of all that it has, up to an error, long before it is its turn."""
    quick = Stream(batches(*[4] * 5) + ([OSError("disk on fire")] if fails else batches(*[4] * 60)))
    slow = Stream(batches(*[4] * 65))
    run = Workers([quick, slow], kind)
    slow.allowed = threading.Semaphore(0)
    for batch in range(1, 6):
        slow.allowed.release()
        for _ in range(run.elements):
            assert are_elements(run.next())
        assert slow.made == batch
        run.wait_for(quick, batch * run.elements - run.prefetch)  # none wait on the devices
    slow.allowed.release(99)
    errors = [str(error) for error in run.next() if isinstance(error, Exception)]
    other = f"worker 0 could not read element {5 * run.elements}: OSError: disk on fire"
    assert errors == (["disk on fire", other] if fails else [])
    run.close()


SIZES = {
    "alike": ((4,) * 6, (4,) * 6),
    "a short one in between": ((4, 4, 2, 4, 4), (4, 4, 2, 4, 4)),
    "a shorter stream": ((4, 4, 4, 4, 4), (4, 4, 3)),
    "a stream of nothing": ((4, 4, 4), ()),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("partial", ["exact", "pad", "drop"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_elements_and_places_are_those_without_reading_ahead(kind, sizes, partial) -> None:
    sizes = SIZES[sizes]
    if kind == "one stream":
        if sizes[0] != sizes[1]:
            return  # an error: test_dataset_agreement.py
        streams = [batches(*sizes[0])] * 2
    else:
        streams = [batches(*its, start=100 * i) for i, its in enumerate(sizes)]

    def passes(prefetch, state=None):
        run = Workers([Stream(its) for its in streams], kind, partial_batch=partial, prefetch=prefetch)
        if state is not None:
            run.restore(state)
        given = []
        while True:
            elements = run.next()
            if isinstance(elements[0], Exception):
                break
            if prefetch:
                run.wait(99)  # all that there is has been read
            given.append(([(examples(e), e.sizes, e.kinds, e.alike) for e in elements], run.state()))
        run.close()
        return given, [repr(error) for error in elements]

    expected, end = passes(0)
    assert passes(2) == (expected, end)
    if expected:
        assert end == ["StopIteration()"] * 2
        middle = len(expected) // 2
        assert passes(2, expected[middle - 1][1]) == (expected[middle:], end)


# --- what goes wrong ------------------------------------------------------------------------------------


def error_and_elements(run, count):
    """So many elements, and then what all workers raise, twice."""
    for _ in range(count):
        assert are_elements(run.next())
        if run.prefetch:
            run.wait(99)
    errors = run.next()
    assert [str(error) for error in run.next()] == [str(error) for error in errors]
    run.close()
    return [f"{type(error).__name__}: {error}" for error in errors]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_comes_after_the_elements_before_it(kind, prefetch) -> None:
    fails = [*batches(4, 4, 4), OSError("disk on fire"), *batches(4, 4)]
    run = Workers([Stream(batches(*[4] * 6)), Stream(fails)], kind, prefetch=prefetch)
    run.streams[1].batches = fails[:4]
    errors = error_and_elements(run, 3 * run.elements)
    assert errors == [
        f"RuntimeError: worker 1 could not read element {3 * run.elements}: OSError: disk on fire",
        "OSError: disk on fire",
    ]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_bad_batch_has_the_number_of_its_element(prefetch) -> None:
    """Although elements that are not full have been left out before it, which its worker could not know."""
    good = batches(4, 4, 2, 4)
    bad = [*good[:3], np.zeros((4, 2), np.float32)]
    run = Workers([Stream(good), Stream(bad)], "one stream", prefetch=prefetch, partial_batch="drop")
    what = "element 2 is float32[4, 2], but was float32 of rank 1 in the first element"
    errors = error_and_elements(run, 2)
    assert errors[0].startswith(f"RuntimeError: worker 1 could not read element 2: TypeError: {what}")
    assert errors[1].startswith(f"TypeError: {what}")


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_missing_is_named(kind) -> None:
    run = Workers([Stream(batches(*[4] * 6)) for _ in range(2)], kind, timeout=0.3)
    stuck = run.streams[1]
    stuck.allowed = threading.Semaphore(2)
    for _ in range(2 * run.elements):
        assert are_elements(run.next())
    found = []

    def one(mine, i):
        if i == 1:
            wait_until(lambda: found)
            stuck.allowed.release(99)
        with pytest.raises(TimeoutError) as caught:
            next(run.iterators[i])
        found.append(str(caught.value))

    run.each(one)
    topic = f"pass 0, element/{2 * run.elements}: "
    assert f"{topic}waited 0.3 s for worker 1 of 2, who did not come." in found[0]
    assert f"{topic}worker 1 came too late, when worker 0 gave up" in found[1]
    run.close()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", soak_except(KINDS, "own streams"))
def test_closing_does_not_wait_for_streams_that_are_stuck(kind) -> None:
    before = set(threading.enumerate())
    run = Workers([Stream(batches(4, 4)) for _ in range(2)], kind)
    for stream in run.streams:
        stream.allowed = threading.Semaphore(1)
    assert are_elements(run.next())
    run.each(lambda mine, i: run.iterators[i].close())
    wait_until(lambda: len(set(threading.enumerate()) - before) == 2)  # those that read
    for stream in run.streams:
        stream.allowed.release()
    wait_until(lambda: not set(threading.enumerate()) - before)


def aligned(size: int) -> np.ndarray:
    """Zeros where JAX takes memory as it is for an array on a CPU."""
    memory = np.zeros(4 * size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + 4 * size].view(np.float32)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of_jax", [False, True])
def test_a_buffer_that_is_filled_again(of_jax, kind, replicas) -> None:
    class Filling(Stream):
        def __iter__(self):
            buffer = aligned(4)
            for batch in super().__iter__():
                buffer[:] = batch
                yield jax.device_put(buffer) if of_jax else buffer

    streams = [Filling(batches(*[4] * 8, start=0 if kind == "one stream" else 100 * i)) for i in range(2)]
    run = Workers(streams, kind, replicas)
    seen = []
    for _ in range(8 * run.elements // (replicas if kind == "a function" else 1)):
        elements = run.next()
        assert are_elements(elements)
        wait_until(lambda: all(stream.made == 8 for stream in streams))
        seen += [x for element in elements for x in examples(element)]
    run.close()
    rows = np.concatenate(streams[0].batches if kind == "one stream" else [*streams[0].batches, *streams[1].batches])
    assert sorted(seen) == sorted(rows.tolist())


def test_batches_of_replicas_are_padded_to_the_largest() -> None:
    def batches(context):
        rows = 2 + 2 * context.input_pipeline_id
        return grain.MapDataset.range(rows).batch(rows)

    run = Run(batches, 2, 1, InputOptions(partial_batch="pad"), from_function=True)
    [step] = run.steps()
    assert step[0].sizes == (2, 4)
    assert [element.filled[0].shape for element in step] == [(1, 4), (1, 4)]

    def wider(context):
        return [np.zeros((2, 3 + context.input_pipeline_id))]

    run = Run(wider, 2, 1, InputOptions(partial_batch="pad"), from_function=True)
    with pytest.raises(ValueError, match=r"different shapes .* worker 0 has float64\[3\]; worker 1 has float64\[4\]"):
        run.steps()


def test_a_worker_whose_stream_has_ended_has_nothing_in_the_shape_that_it_had_last() -> None:
    streams = [Stream([np.zeros((4, n), np.float32) for n in shape]) for shape in ((2, 3, 2), (2, 3))]
    run = Workers(streams, "a function")
    *_, last = run.steps()
    for element in last:
        assert element.shapes == [((4, 2), (0, 3))]
    assert [part.leaves[0].shape for element in last for part in element.parts] == [(4, 2), (0, 3)]
    run.close()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Row:
    x: np.ndarray


def test_a_worker_that_never_had_anything_can_not_make_a_class_of_the_others() -> None:
    run = Workers([Stream([Row(np.zeros(4))]), Stream([])], "a function")
    told = "this worker has nothing for element 0, and worker 0 has Row(x='float64 of rank 1'), of which it can't make"
    assert str(run.next()[1]).startswith(told)
    run.close()
