"""What feeds towers: a whole element for each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import replicax
from replicax.compat import v1 as tf
from tests.compat.executors import Executor, entered, numbers, on_both, two_towers


@on_both
def test_each_tower_gets_a_whole_element(executor: Executor) -> None:
    d = two_towers()
    with entered(d, executor):
        dataset = d.distribute_dataset([np.arange(3.0), np.arange(2.0), np.arange(4.0)])  # of any size
        iterator = dataset.make_one_shot_iterator()
        assert [x.shape for x in d.unwrap(iterator.get_next())] == [(3,), (2,)]
        with pytest.raises(StopIteration):  # for the third there is one tower only
            iterator.get_next()
        assert len(list(dataset)) == len(list(dataset.make_one_shot_iterator())) == 1


@on_both
def test_elements_of_any_shape(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scalars, and arrays that have no dim in common; what comes is on the devices already."""
    d = two_towers()
    elements = [{"i": i, "x": np.ones((2, 3), np.float32), "y": np.full(5, i, np.float32)} for i in range(4)]
    with entered(d, executor):
        iterator = d.distribute_dataset(lambda: elements).make_one_shot_iterator()
        monkeypatch.setattr(replicax.Strategy, "run", None)  # no step is run for it
        for expected in ([0, 1], [2, 3]):
            element = iterator.get_next()
            assert [[x.shape for x in d.unwrap(element[key])] for key in "ixy"] == [[()] * 2, [(2, 3)] * 2, [(5,)] * 2]
            assert numbers(d, element["i"]) == expected
            assert [next(iter(x.devices())) for x in d.unwrap(element["i"])] == d.worker_devices
        with pytest.raises(StopIteration):
            iterator.get_next()
    with entered(tf.OneDeviceStrategy("cpu:1"), executor) as one:
        assert one.distribute_dataset([1.5]).make_one_shot_iterator().get_next().shape == ()


@on_both
@pytest.mark.parametrize("count", [1, 2])
def test_a_last_batch_of_another_size(executor: Executor, count: int) -> None:
    """With a number beside it, and more elements than the towers share: one compiled program, with no warning."""
    d = tf.MirroredStrategy([f"cpu:{i}" for i in range(count)])
    sizes = [3, 3, 3, 1, 2]

    def step_fn(ctx: tf.MultiStepContext, x: Any, weight: Any) -> None:
        def tower_fn(x: Any, weight: Any) -> Any:
            return x.sum() * weight

        ctx.set_last_step_output("total", d.call_for_each_tower(tower_fn, x, weight), "sum")

    with entered(d, executor):
        dataset = d.distribute_dataset([(np.ones((size, 2), np.float32), 10.0**i) for i, size in enumerate(sizes)])
        first, *_, last = [[x.shape for x in d.unwrap(x)] for x, _ in dataset]
        assert (first, last) == ([(3, 2)] * count, [(3, 2), (1, 2)] if count == 2 else [(2, 2)])
        iterator = dataset.make_one_shot_iterator()
        rounds = len(sizes) // count
        totals = [2 * sum(sizes[i] * 10.0**i for i in range(k * count, (k + 1) * count)) for k in range(rounds)]
        ctx = d.run_steps_on_dataset(step_fn, iterator, iterations=rounds - 1)
        assert float(ctx.last_step_outputs["total"]) == pytest.approx(totals[-2])
        ctx = d.run_steps_on_dataset(step_fn, iterator, iterations=10)
        assert float(ctx.last_step_outputs["total"]) == pytest.approx(totals[-1])


def test_elements_that_are_not_alike() -> None:
    d = two_towers()
    with d.scope():
        for wrong in ([np.ones(2), np.ones((2, 2))], [np.ones(2), {"x": np.ones(2)}], [np.ones(2), np.ones(2, int)]):
            iterator = d.distribute_dataset(wrong).make_one_shot_iterator()
            with pytest.raises(TypeError, match="first"):
                iterator.get_next()
        with pytest.raises(TypeError, match="is str 'text'; a batch is a pytree of arrays"):
            next(d.distribute_dataset([{"x": "text"}] * 2).make_one_shot_iterator())


def test_what_is_no_dataset() -> None:
    d = two_towers()
    with d.scope():
        for wrong in (3, "text", lambda: 3, lambda: None, iter([np.ones(1)]), {"x": 1}, list):
            with pytest.raises(ValueError, match="distribute_dataset: "):
                d.distribute_dataset(wrong)


def test_what_datasets_may_be() -> None:
    d = two_towers()
    arrays = (np.arange(4.0), np.arange(8.0).reshape(4, 2))

    def generator() -> Any:
        yield from zip(*arrays, strict=True)

    with d.scope():
        kinds = [arrays, lambda: arrays, generator, lambda: generator(), d.strategy.make_numpy_dataset(arrays)]
        kinds += [list(generator()), lambda: list(generator())]
        for kind in kinds:
            dataset = d.distribute_dataset(kind)
            for _ in range(2):  # a pass after the other
                first = [numbers(d, x) for x, _ in dataset]
                assert first == [[0, 1], [2, 3]]


def test_the_dataset_function_is_called_once() -> None:
    d = two_towers()
    calls = []

    def dataset_fn() -> Any:
        calls.append(None)
        return [np.ones(2), np.ones(2)]

    with d.scope():
        dataset = d.distribute_dataset(dataset_fn)
        assert len(list(dataset)) + len(list(dataset)) == 2
    assert len(calls) == 1
