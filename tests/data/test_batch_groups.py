"""The elements of an iterator, taken several at once."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.data.batches import pass_reader
from replicax.execution.many_steps.element_groups import ElementGroup
from tests.conftest import strategy_of
from tests.sources import numbered


def test_tuples_are_unpacked(pair) -> None:
    def step(ctx, x, y):
        ctx.set_last_step_output("sum", (x * y).sum(), "sum")

    iterator = iter(pair.distribute_dataset([(np.ones(2), np.full(2, 3.0))] * 2))
    assert float(pair.run_steps(step, iterator, 2).last_step_outputs["sum"]) == 6.0


def collect(strategy: replicax.Strategy) -> tuple[Callable[..., None], Callable[[], list[int]]]:
    """A step that writes down the numbers that it gets, and what it has written."""
    with strategy.scope():
        log = replicax.Variable(np.full(64, -1, np.int32), name="log")
        position = replicax.Variable(0, name="position")

    def step(ctx, x):
        everything = replicax.get_replica_context().all_gather(x, axis=0)
        log.assign(jax.lax.dynamic_update_slice(log.value, everything, (position.value,)))
        position.assign_add(jnp.int32(everything.shape[0]))

    return step, lambda: log.numpy()[: int(position)].tolist()


@pytest.mark.covering(1)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_any_mixture_of_next_and_run_steps_sees_each_element_once(replicas, prefetch) -> None:
    strategy = strategy_of(replicas)
    step, seen = collect(strategy)
    dataset = strategy.distribute_dataset(numbered(24), replicax.InputOptions(prefetch=prefetch))
    iterator = iter(dataset)
    by_hand: list[int] = []

    def take() -> None:
        x = next(iterator)
        strategy.run(lambda x: step(None, x), args=(x,))
        by_hand.extend(strategy.gather(x, axis=0).tolist() if replicas > 1 else x.tolist())

    take()
    for k in (4, 4, 3):
        assert strategy.run_steps(step, iterator, k).steps == k
    take()
    state = iterator.get_state()
    take()
    for k in (1, 5, 20):
        strategy.run_steps(step, iterator, k)
    assert seen() == list(range(48))
    assert by_hand == [0, 1, 24, 25, 26, 27]
    iterator.set_state(state)
    assert [int(np.asarray(strategy.local_results(x)[0])[0]) for x in iterator] == list(range(26, 48, 2))


@pytest.mark.parametrize("first", [1, 2])
def test_an_interrupt_while_it_waits_for_elements_loses_none(pair, first: int) -> None:
    """The first two of three elements are there when Ctrl-C comes, in groups as large as what was asked for first."""
    step, seen = collect(pair)
    is_asked, comes = threading.Event(), threading.Event()

    class Batches:
        def __iter__(self):
            for batch in numbered(6):
                if batch[0] == 2 * (first + 2):
                    is_asked.set()
                    assert comes.wait(60.0)
                yield batch

    def interrupt() -> None:
        is_asked.wait(60.0)
        time.sleep(0.5)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    iterator = iter(pair.distribute_dataset(Batches()))
    pair.run_steps(step, iterator, first)
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        pair.run_steps(step, iterator, 3)
    assert seen() == list(range(2 * first))
    comes.set()
    assert pair.run_steps(step, iterator, 3).steps == 3
    assert pair.run_steps(step, iterator, 3).steps == 3 - first
    assert seen() == list(range(12))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(pass_reader, "group_of"), (pass_reader, "joined"), (ElementGroup, "split"), (ElementGroup, "elements")],
)
def test_what_fails_while_elements_are_taken_loses_none(pair, monkeypatch, owner, name, error) -> None:
    step, seen = collect(pair)
    iterator, failed = iter(pair.distribute_dataset(numbered(30))), 0

    def run_next() -> None:
        pair.run(lambda x: step(None, x), args=(next(iterator),))

    def run_exactly() -> None:
        with replicax.debug():
            pair.run_steps(step, iterator, 2)

    def fails(*_):
        raise error("while elements are taken")

    run_next()
    for call in (lambda: pair.run_steps(step, iterator, 3), run_next, run_exactly) * 2:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails)
            try:
                call()
            except error:
                failed += 1
        call()
    with contextlib.suppress(StopIteration):
        while True:
            run_next()
    assert failed
    assert seen() == list(range(60))


def test_elements_read_ahead_one_by_one_cost_the_first_call_only(pair, caplog) -> None:
    """Elements that ``next`` has read ahead don't shift the groups of later calls, which would be cut and joined."""
    ahead = threading.Event()

    def source():
        for number in range(24):
            if number == 2:
                ahead.set()
            yield np.full((2, 37), number, np.float32)

    iterator = iter(pair.distribute_dataset(source))
    next(iterator)
    assert ahead.wait(10)
    seen = []

    def step(ctx, x):
        ctx.set_last_step_output("x", x.sum(), "sum")

    with jax.log_compiles():
        for _ in range(4):
            caplog.clear()
            pair.run_steps(step, iterator, 5)
            seen.append([r.getMessage() for r in caplog.records if "Finished XLA compilation" in r.getMessage()])
    assert seen[0]
    assert seen[1:] == [[], [], []]


def test_what_is_left_of_padded_elements_knows_its_padding(pair) -> None:
    """A call takes a part of what was read together; the others come one by one, with their own examples."""
    batches = [np.arange(size, dtype=np.int32) + 10 * i for i, size in enumerate([4, 3, 2, 4, 1, 2] * 3)]
    iterator = iter(pair.distribute_dataset(batches, replicax.InputOptions(partial_batch="pad")))
    examples = []

    def step(ctx, x):
        replica = replicax.get_replica_context()
        replica.merge_call(lambda strategy, x: ctx.set_last_step_output("x", x), args=(x,))

    for steps in (4, 4, 3):
        last = pair.run_steps(step, iterator, steps).last_step_outputs["x"]
        examples += [pair.gather(x, axis=0).tolist() for x in (last, next(iterator))]
    assert examples == [batches[i].tolist() for i in (3, 4, 8, 9, 12, 13)]


def test_elements_of_several_shapes(pair) -> None:
    """Runs of one shape have a loop each, and groups stay together: two programs, whatever comes."""
    step, seen = collect(pair)
    sizes, start, data = [2, 2, 4, 2, 2, 2, 4, 4, 4], 0, []
    for size in sizes:
        data.append(np.arange(start, start + size, dtype=np.int32))
        start += size
    iterator = iter(pair.distribute_dataset(data))
    assert [pair.run_steps(step, iterator, 3).steps for _ in range(3)] == [3, 3, 3]
    assert seen() == list(range(start))
    assert pair.extended.trace_count(step) == 2


def test_an_error_of_the_dataset_comes_after_the_steps_before_it(pair) -> None:
    step, seen = collect(pair)

    def source():
        yield from numbered(5)
        raise OSError("the disk is gone")

    iterator = iter(pair.distribute_dataset(source))
    pair.run_steps(step, iterator, 3)
    with pytest.raises(OSError, match="the disk is gone") as error:
        pair.run_steps(step, iterator, 3)
    assert "2 of the 3 steps" in error.value.__notes__[-1]
    assert seen() == list(range(10))


def test_a_refused_step_leaves_the_elements_to_come(pair) -> None:
    step, seen = collect(pair)
    with pair.scope():
        v = replicax.Variable(0.0, name="v")

    def wrong(ctx, x):
        v.assign_add(1.0)
        v.assign(jnp.float32(x[0]))

    iterator = iter(pair.distribute_dataset(numbered(7)))
    pair.run_steps(step, iterator, 3)
    with pytest.raises(replicax.errors.LocalityError, match="'v'"):
        pair.run_steps(wrong, iterator, 3)
    assert float(v) == 0.0
    pair.run_steps(step, iterator, 3)
    state = iterator.get_state()
    assert seen() == list(range(12))
    with pytest.raises(replicax.errors.LocalityError):
        pair.run_steps(wrong, iterator, 3)
    assert iterator.get_state() == state
    pair.run_steps(step, iterator, 3)
    assert seen() == list(range(14))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_place_in_the_middle_of_a_group_is_that_of_its_next_element(pair, prefetch) -> None:
    step, _ = collect(pair)
    dataset = pair.distribute_dataset(numbered(12), replicax.InputOptions(prefetch=prefetch))
    iterator, other = iter(dataset), iter(dataset)
    pair.run_steps(step, iterator, 4)

    def wrong(ctx, x):
        raise RuntimeError("no such layer")

    with pytest.raises(RuntimeError, match="no such layer"):
        pair.run_steps(wrong, iterator, 4)  # which come again, one by one
    for number in range(4, 8):
        other.set_state(iterator.get_state())
        ours, theirs = (pair.gather(next(each), axis=0).tolist() for each in (iterator, other))
        assert ours == theirs, number


def test_elements_of_several_sizes_come_again_in_their_order(pair) -> None:
    step, seen = collect(pair)
    iterator = iter(pair.distribute_dataset(np.split(np.arange(18, dtype=np.int32), [4, 8, 10, 14])))

    def wrong(ctx, x):
        raise RuntimeError("no such layer")

    with pytest.raises(RuntimeError, match="no such layer"):
        pair.run_steps(wrong, iterator, 5)
    pair.run_steps(step, iterator, 5)
    assert seen() == list(range(18))


def test_after_a_step_that_fails_the_place_is_that_of_its_element(pair) -> None:
    def fail() -> None:
        raise RuntimeError("no such layer")

    def step(ctx, x):
        if x.shape[0] == 2:
            jax.debug.callback(fail)

    dataset = pair.distribute_dataset(np.split(np.arange(10, dtype=np.int32), [2, 6]))
    iterator, other = iter(dataset), iter(dataset)
    with pytest.raises(RuntimeError, match="no such layer"):
        pair.run_steps(step, iterator, 2)
    other.set_state(iterator.get_state())
    assert [pair.gather(next(each), axis=0).tolist() for each in (iterator, other)] == [[2, 3, 4, 5]] * 2


def test_elements_are_staged_while_a_loop_runs(pair) -> None:
    """The dataset is read from another thread, ahead of the steps."""
    read: list[int] = []
    threads = set()

    def source():
        for i in range(40):
            read.append(i)
            threads.add(threading.get_ident())
            yield np.full(2, i, np.int32)

    step, _ = collect(pair)
    iterator = iter(pair.distribute_dataset(source))
    pair.run_steps(step, iterator, 10)
    deadline = time.monotonic() + 20
    while len(read) < 30 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(read) >= 30  # two more groups wait on the devices
    assert threading.get_ident() not in threads
