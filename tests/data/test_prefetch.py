"""Reading ahead: what happens in the background, and how it ends."""

from __future__ import annotations

import gc
import threading
import time
import traceback
import weakref

import grain
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from replicax import DistributedIterator, InputOptions
from replicax.data.batches.prefetch import Prefetcher
from tests import processes
from tests.data import simulated
from tests.data.simulated import Run
from tests.soaking import soak_except
from tests.sources import Slow, wait_until


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_so_many_elements_wait_on_the_devices(pair, depth) -> None:
    source = Slow(20)
    iterator = iter(pair.distribute_dataset(source, InputOptions(prefetch=depth)))
    time.sleep(0.02)
    assert source.made == 0  # nothing is read before it is asked for
    next(iterator)
    wait_until(lambda: source.made == depth + 1)  # one was taken, and `depth` wait
    time.sleep(0.05)
    assert source.made == depth + 1
    assert threading.main_thread() not in source.threads
    iterator.close()


def test_without_reading_ahead_nothing_happens_in_the_background(pair) -> None:
    source = Slow()
    iterator = iter(pair.distribute_dataset(source, InputOptions(prefetch=0)))
    next(iterator)
    assert source.made == 1
    assert source.threads == {threading.main_thread()}


class Arrays:
    """A stage that makes arrays of one size without an end."""

    is_placing = False
    made = 0

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __next__(self) -> np.ndarray:
        self.made += 1
        return np.zeros(self.nbytes, np.uint8)

    def state(self) -> bytes:
        return b""

    def cancel(self) -> None:
        pass

    close = cancel


@pytest.mark.parametrize(("nbytes", "waiting"), [(40, 3), (50, 2), (200, 1), (1, 8)])
def test_so_many_bytes_wait_on_the_host(nbytes, waiting) -> None:
    stage, threads = Arrays(nbytes), threading.active_count()
    prefetcher = Prefetcher(stage, 8, most_bytes=100)
    next(prefetcher)
    wait_until(lambda: stage.made == 1 + waiting)
    time.sleep(0.02)
    assert stage.made == 1 + waiting
    prefetcher.close()
    assert threading.active_count() == threads


@pytest.mark.usefixtures("young_heap")
@pytest.mark.covering(1)
@pytest.mark.parametrize("how", ["close", "with", "drop", "break"])
@pytest.mark.parametrize("source", ["numbered", "loader", "slow"])
def test_threads_end(pair, how, source) -> None:
    makers = {
        "numbered": lambda: grain.MapDataset.range(400).map(np.float32).batch(4),
        "loader": lambda: grain.DataLoader(
            data_source=np.arange(400.0),
            sampler=grain.samplers.IndexSampler(400, num_epochs=1),
            operations=[grain.transforms.Batch(4)],
        ),
        "slow": lambda: Slow(1000),
    }
    dataset = pair.distribute_dataset(makers[source]())
    before = set(threading.enumerate())
    if how == "break":
        for _ in dataset:
            break
    else:
        iterator = iter(dataset)
        element = next(iterator)
        alive = weakref.ref(element)
        assert set(threading.enumerate()) - before
        if how == "close":
            iterator.close()
            iterator.close()
        elif how == "with":
            with iterator:
                pass
        if how != "drop":
            wait_until(lambda: not set(threading.enumerate()) - before)
        del iterator, element
        gc.collect()
        assert alive() is None
    gc.collect()
    wait_until(lambda: not set(threading.enumerate()) - before)


def test_after_a_thread_could_not_start_the_next_may(pair, monkeypatch) -> None:
    def refuses(thread):
        raise RuntimeError("can't start new thread")

    with iter(pair.distribute_dataset([np.zeros(4)])) as iterator:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuses)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                next(iterator)
        assert iterator._reader._prefetcher._thread is None
        next(iterator)


def test_a_place_that_is_set_ends_the_thread_before(pair) -> None:
    before = set(threading.enumerate())
    with iter(pair.distribute_dataset([np.zeros(4)] * 20, InputOptions(prefetch=1))) as iterator:
        for _ in range(3):
            next(iterator)
            iterator.set_state(iterator.get_state())
        next(iterator)
        wait_until(lambda: len(set(threading.enumerate()) - before) == 1)


def test_an_iterator_of_the_user_is_closed_once(pair) -> None:
    closed = []

    class Batches:
        def __next__(self):
            return np.zeros(4)

        def close(self):
            closed.append(self)

        def __iter__(self):
            return self

    iterator = iter(pair.distribute_dataset(lambda: Batches()))
    next(iterator)
    iterator.close()
    del iterator
    gc.collect()
    assert len(closed) == 1


def test_a_closed_iterator_says_so(pair) -> None:
    iterator = iter(pair.distribute_dataset(Slow()))
    next(iterator)
    iterator.close()
    for use in (next, DistributedIterator.get_state):
        with pytest.raises(ValueError, match="the iterator has been closed"):
            use(iterator)


@pytest.mark.parametrize(("depth", "error"), [(0, OSError), (2, OSError), (2, SystemExit)])
def test_a_pass_that_has_failed_does_not_look_as_if_it_had_ended(pair, depth, error) -> None:
    def broken():
        yield np.zeros(4)
        deep_inside()

    def deep_inside():
        raise error("disk on fire")

    iterator = iter(pair.distribute_dataset(broken, InputOptions(prefetch=depth)))
    next(iterator)
    for _ in range(3):
        with pytest.raises(error, match="disk on fire") as caught:
            next(iterator)
        assert "deep_inside" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    iterator.set_state(iterator.get_state())  # tries again
    with pytest.raises(error, match="disk on fire"):
        next(iterator)


class Stuck:
    """One batch, and then a wait for another that comes when ``go_on`` is set."""

    def __init__(self) -> None:
        self.is_waiting = threading.Event()
        self.go_on = threading.Event()

    def __iter__(self):
        yield np.zeros(4)
        self.is_waiting.set()
        assert self.go_on.wait(60)
        yield np.zeros(4)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", soak_except(["close", "drop"], "close"))
def test_closing_does_not_wait_for_a_source_that_is_stuck(pair, how) -> None:
    source = Stuck()
    before = set(threading.enumerate())
    iterator = iter(pair.distribute_dataset(source))
    next(iterator)
    assert source.is_waiting.wait(10)
    if how == "close":
        iterator.close()
    del iterator
    gc.collect()
    assert len(set(threading.enumerate()) - before) == 1  # it is still waiting,
    source.go_on.set()
    wait_until(lambda: not set(threading.enumerate()) - before)  # and then ends


@pytest.mark.usefixtures("impatient")
def test_closing_waits_while_an_element_is_put_on_the_devices(monkeypatch) -> None:
    begun, done = [], []

    def place(element):
        begun.append(element)
        time.sleep(0.3 if done else 0.0)
        done.append(element)

    monkeypatch.setattr(simulated, "_taken", place)
    run = Run(lambda context: [np.zeros(4)] * 3)
    next(run.iterators[0])
    wait_until(lambda: len(begun) == 2)
    run.close()
    assert len(done) == 2


@pytest.mark.usefixtures("impatient")
def test_closing_wakes_who_waits_for_an_element(pair) -> None:
    source = Stuck()
    iterator = iter(pair.distribute_dataset(source))
    next(iterator)
    errors = []

    def wait() -> None:
        try:
            next(iterator)
        except ValueError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert source.is_waiting.wait(10)
    iterator.close()
    waiting.join(10)
    source.go_on.set()
    assert errors == ["the iterator has been closed: iter(dataset) makes another one"]


def test_settings_of_the_thread_hold_in_the_background(pair) -> None:
    with jax.enable_x64(True):
        element = next(iter(pair.distribute_dataset([np.zeros(4, np.float64)])))
        assert element.values[0].dtype == jnp.float64


@pytest.mark.usefixtures("young_heap")
def test_memory_stays_flat(pair) -> None:
    process = psutil.Process()
    batch = np.zeros((64, 64), np.float32)

    def endless():
        while True:
            yield batch

    def grown(go_on) -> float:
        gc.collect()
        before = process.memory_info().rss
        go_on()
        gc.collect()
        return (process.memory_info().rss - before) / 2**20

    with iter(pair.distribute_dataset(endless)) as iterator:

        def take(n):
            for _ in range(n):
                next(iterator)

        take(500)
        # 2,000 elements of 16 KiB are 31 MiB.
        assert grown(lambda: take(2_000)) < 16

    dataset = pair.distribute_dataset(grain.MapDataset.source([batch] * 8))

    def open_and_close(n):
        for _ in range(n):
            with iter(dataset) as iterator:
                next(iterator)

    open_and_close(20)
    threads = threading.active_count()
    assert grown(lambda: open_and_close(100)) < 16
    assert threading.active_count() <= threads


def test_programs_end_with_iterators_open_and_after_their_sources_are_closed() -> None:
    programs = [[*processes.MODULE, f"tests.data.{name}"] for name in ("open_iterators", "slow_closing")]
    assert processes.run_programs(programs) == ["[(2,), (2,), (2,), (2,)]\n", "1\nclosed\n"]
