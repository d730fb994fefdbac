"""The steps of a run: what ``strategy.run`` would do in a loop, for as many steps as there are to be."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
from typing import Any, Generic, TypeVar, get_origin

import jax
import numpy as np
import pytest

import replicax
from tests.conftest import leaving_no_arrays, strategy_of
from tests.loop.models import STRATEGIES, Line, Recorder, by_hand
from tests.soaking import soak_except

Value = TypeVar("Value")


pytestmark = pytest.mark.usefixtures("promotion_of_dtypes")


EVEN, UNEVEN = (8, 8, 8), (8, 8, 3)
QUICK = [
    ("one device", UNEVEN, "exact", "compiled", 4),
    ("mirrored 2", UNEVEN, "pad", "compiled", 4),
    ("mirrored 2", UNEVEN, "exact", "exact", 1),
    ("sharded 4", UNEVEN, "exact", "compiled", 4),
    ("tpu", EVEN, "exact", "compiled", 1),
    ("logical 2x2", UNEVEN, "pad", "compiled", 4),
    ("central 2", UNEVEN, "exact", "compiled", 1),
]
GRID = list(itertools.product(STRATEGIES, (EVEN, UNEVEN), ("exact", "pad"), ("compiled", "exact"), (1, 4)))


@pytest.mark.parametrize(
    ("kind", "sizes", "partial", "executor", "steps_per_call"),
    soak_except(GRID, *QUICK),
)
def test_a_run_does_what_a_loop_by_hand_does(
    kind: str, sizes: tuple[int, ...], partial: str, executor: str, steps_per_call: int
) -> None:
    options = replicax.InputOptions(partial_batch=partial)
    ours, theirs = Line(STRATEGIES[kind]()), Line(STRATEGIES[kind]())
    recorder = Recorder()
    with replicax.debug() if executor == "exact" else contextlib.nullcontext():
        run = replicax.train(
            ours.step,
            ours.dataset(sizes, options),
            7,
            log_every=2,
            callbacks=[recorder],
            steps_per_call=steps_per_call,
            progress=False,
        )
    losses = by_hand(theirs, theirs.dataset(sizes, options), 7)
    assert [step for step, _ in recorder.logged] == [2, 4, 6, 7]
    np.testing.assert_allclose(
        [v["loss"] for _, v in recorder.logged], [losses[i - 1] for i in (2, 4, 6, 7)], rtol=2e-5
    )
    assert recorder.logged[-1][1]["first weight"] == pytest.approx(float(ours.w.numpy()[0, 0]))
    for a, b in zip(ours.state(), theirs.state(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    assert run.step == 7
    assert run.examples == sum(itertools.islice(itertools.cycle(sizes), 7))


@pytest.mark.parametrize("kind", ["mirrored 2", *(pytest.param(k, marks=pytest.mark.soak) for k in STRATEGIES)])
def test_steps_per_call_changes_no_bit(kind: str) -> None:
    found = []
    for steps_per_call in (1, 8):
        line, recorder = Line(STRATEGIES[kind]()), Recorder()
        examples = line.strategy.make_numpy_dataset({k: np.concatenate([b[k] for b in line.batches()]) for k in "xy"})
        dataset = line.strategy.distribute_dataset(examples.seed(1).shuffle().batch(8).repeat())
        replicax.train(
            line.step, dataset, 45, log_every=9, steps_per_call=steps_per_call, callbacks=[recorder], progress=False
        )
        found.append((recorder.logged, [x.tobytes() for x in line.state()]))
    assert all(f == found[0] for f in found)


def test_a_dataset_of_the_user_is_distributed_by_the_current_strategy() -> None:
    line = Line(strategy_of(2))
    with line.strategy.scope():
        run = replicax.train(line.step, line.batches(), 6, progress=False)
    assert run.strategy is line.strategy
    assert run.examples == 48
    run = replicax.train(line.step, line.batches(), 2, progress=False, strategy=line.strategy)
    assert run.strategy is line.strategy
    with pytest.raises(replicax.errors.ContextError, match=r"Mirrored.*train takes strategy=…, or a dataset"):
        replicax.train(line.step, line.batches(), 2, progress=False)


def test_an_iterator_goes_on_from_where_it_is() -> None:
    strategy = strategy_of(2)
    batches = iter(strategy.distribute_dataset([np.full(4, float(i), np.float32) for i in range(5)]))
    next(batches)
    run = replicax.train(replicax.compute_average_loss, batches, 2, progress=False)
    assert run.numbers["loss"] == 2.0
    assert float(strategy.reduce("mean", next(batches), axis=0)) == 3.0


@pytest.mark.parametrize("is_saved", [False, True], ids=["not saved", "saved"])
def test_passes_after_that_of_an_iterator_are_whole(is_saved: bool, tmp_path: pathlib.Path) -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        seen = replicax.Variable(np.zeros(4, np.float32), name="seen", aggregation="sum")
    batches = iter(strategy.distribute_dataset(list(np.eye(4, dtype=np.float32)[:, None].repeat(2, 1))))
    next(batches), next(batches)

    def step(x: jax.Array) -> None:
        seen.assign_add(x[0] / 2)

    replicax.train(step, batches, 7, checkpoints=tmp_path if is_saved else None, progress=False)
    assert seen.numpy().tolist() == [2, 1, 2, 2]  # batches 2 3, 0 1 2 3, 0


def test_a_step_that_is_refused_has_not_had_its_element() -> None:
    strategy = strategy_of(2)
    batches = iter(strategy.distribute_dataset([np.full(size, float(size), np.float32) for size in (2, 2, 4, 6)]))

    def step(x: jax.Array) -> jax.Array:
        if x.shape[0] == 2:
            raise ValueError("this step takes one example")
        return replicax.compute_average_loss(x)

    with pytest.raises(ValueError, match="this step takes one example"):
        replicax.train(step, batches, 4, progress=False)
    assert [float(strategy.reduce("mean", batch, axis=0)) for batch in batches] == [4.0, 6.0]


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_a_dataset_that_can_be_gone_through_once_ends_the_run_by_an_error(steps_per_call: int) -> None:
    strategy, recorder = strategy_of(2), Recorder()
    passes = []

    def once() -> Any:
        if not passes:
            yield from [np.zeros(4, np.float32)] * 3
            passes.append(1)

    with pytest.raises(ValueError, match="the generator function .*once, gave no element"):
        replicax.train(
            replicax.compute_average_loss,
            strategy.distribute_dataset(once),
            5,
            steps_per_call=steps_per_call,
            callbacks=[recorder],
            progress=False,
        )
    assert recorder.calls[-1] == ("end", 3)


def test_no_call_goes_past_a_step_after_which_something_happens() -> None:
    strategy, recorder = strategy_of(2), Recorder()
    batches = strategy.distribute_dataset([np.full(4, float(i), np.float32) for i in range(1, 21)])
    run = replicax.train(
        replicax.compute_average_loss,
        batches,
        10,
        steps_per_call=4,
        log_every=7,
        callbacks=[recorder],
        progress=False,
    )
    assert run.step == 10
    assert recorder.logged == [(7, {"loss": 7.0}), (10, {"loss": 10.0})]


def test_no_steps_are_nothing_to_do(capsys: Any) -> None:
    line, recorder = Line(strategy_of(2)), Recorder()
    run = replicax.train(line.step, line.dataset(), 0, evaluate=(line.evaluate, line.dataset()), callbacks=[recorder])
    assert run.step == 0
    assert recorder.calls == [("start", 0), ("end", 0)]
    assert "nothing to do: there are to be 0 steps" in capsys.readouterr().out


def test_a_step_that_returns_nothing_logs_metrics_alone() -> None:
    line, recorder = Line(strategy_of(2)), Recorder()

    def step(batch: Any) -> None:
        line.step(batch)

    replicax.train(step, line.dataset(), 4, log_every=2, metrics=[line.mean], callbacks=[recorder], progress=False)
    assert [list(values) for _, values in recorder.logged] == [["mean loss"], ["mean loss"]]
    assert float(line.mean.result()) == 0.0


def test_an_error_in_a_step_is_raised_and_callbacks_are_told_of_the_end() -> None:
    line, recorder = Line(strategy_of(2)), Recorder()

    def step(batch: Any) -> Any:
        raise ArithmeticError("wrong")

    with pytest.raises(ArithmeticError, match="wrong"):
        replicax.train(step, line.dataset(), 6, callbacks=[recorder], progress=False)
    assert recorder.calls == [("start", 0), ("end", 0)]


def test_a_callback_with_a_method_that_is_never_called() -> None:
    with pytest.raises(
        TypeError, match=r"^Own.on_step_end would never be called: .* has on_start, on_log, .*log_every=1"
    ):
        type("Own", (replicax.Callback,), {"on_step_end": lambda self, run: None})
    type("Own", (replicax.Callback,), {"on_log": lambda self, run, step, values: None, "on_gpu": True})


def test_a_callback_may_have_other_bases_that_look_at_their_subclasses() -> None:
    class Own(replicax.Callback, Generic[Value]):
        pass

    assert get_origin(Own[int]) is Own


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_run_that_is_kept_keeps_no_model(evaluates: bool) -> None:
    """Otherwise an old model would take the GPU's memory from the next one."""
    strategy = strategy_of(2)

    def train() -> replicax.TrainingRun:
        model = Line(strategy)
        evaluation = (model.evaluate, model.dataset()) if evaluates else None
        return replicax.train(model.step, model.dataset(), 6, log_every=2, evaluate=evaluation, progress=False)

    train()
    with leaving_no_arrays():
        run = train()
    assert run.step == 6
