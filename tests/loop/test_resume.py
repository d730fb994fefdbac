"""A run that goes on where another has stopped, to the same end."""

from __future__ import annotations

import csv
import dataclasses
import functools
import os
import pathlib
import signal
from typing import Any

import jax
import numpy as np
import pytest

import replicax
from tests.conftest import strategy_of
from tests.loop.models import STRATEGIES, Line, Recorder

pytestmark = pytest.mark.usefixtures("promotion_of_dtypes")


class Killed(Exception):  # noqa: N818
    """Stands for the end of the process."""


class DiesAt(replicax.Callback):
    def __init__(self, step: int, how: Any = Killed) -> None:
        self.step, self.how = step, how

    def on_log(self, run: replicax.TrainingRun, step: int, values: Any) -> None:
        if step == self.step:
            if isinstance(self.how, int):
                os.kill(os.getpid(), self.how)
            else:
                raise self.how


def attempt(
    folder: pathlib.Path, kind: str = "mirrored 2", steps: int = 40, new: bool = False, **kwargs: Any
) -> tuple[Line, Recorder, Any]:
    """One process's part of a run: all values are those of the start, as in a process of its own.

    What is ``new`` has no compiled program either, nor slots of the optimizer before its first step.
    """
    line, recorder = Line(STRATEGIES[kind]()) if new else started(kind), Recorder()
    examples = line.strategy.make_numpy_dataset({k: np.concatenate([b[k] for b in line.batches()]) for k in "xy"})
    dataset = line.strategy.distribute_dataset(examples.seed(3).shuffle().batch(8).repeat())
    checkpoint = replicax.Checkpoint(w=line.w, optimizer=line.optimizer, seen=line.seen)
    kwargs = {"log_every": 4, "metrics": [line.mean], "steps_per_call": None, "progress": False} | kwargs
    callbacks = [*kwargs.pop("callbacks", ()), recorder]
    every = kwargs.pop("every", 10)
    if kwargs.get("evaluate") == "by step":
        kwargs["evaluate"] = kwargs.pop("judge")(line), line.dataset()
    manager = replicax.CheckpointManager(checkpoint, folder, every_steps=every, best=kwargs.pop("best", None))
    try:
        run = replicax.train(line.step, dataset, steps, checkpoints=manager, callbacks=callbacks, **kwargs)
    except (Killed, KeyboardInterrupt, SystemExit) as error:
        manager.wait()  # a killed process's save may have come to its end
        return line, recorder, error
    return line, recorder, run


@functools.cache
def line_of(kind: str) -> Line:
    return Line(STRATEGIES[kind]())


def started(kind: str) -> Line:
    """A line that has not been trained, with the programs of those before."""
    line = line_of(kind)
    for variable in (line.w, line.seen, *line.optimizer.variables):
        variable.assign(np.zeros(variable.shape, variable.dtype))
    line.mean.reset()
    return line


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Line, Recorder]:
    """The run without an interruption."""
    with jax.numpy_dtype_promotion("standard"):
        line, recorder, _ = attempt(tmp_path_factory.mktemp("whole"), new=True)
    return line, recorder


@pytest.mark.parametrize("how", [Killed, signal.SIGINT, signal.SIGTERM], ids=["killed", "Ctrl-C", "SIGTERM"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(
    tmp_path: pathlib.Path, whole: Any, how: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    undisturbed, recorded = whole
    _, before, error = attempt(tmp_path / "parts", progress=True, callbacks=[DiesAt(24, how)])
    out = capsys.readouterr().out
    at = 20 if how is Killed else before.saved[-1]
    assert before.saved[:2] == [10, 20]
    assert at >= 20
    if how is signal.SIGTERM:
        assert error.code == replicax.EXIT_PREEMPTED
        assert f"saved in {tmp_path / 'parts'}" in out
        assert f"SIGTERM: the run has stopped after step {at}" in out
    resumed, after, run = attempt(tmp_path / "parts", new=how is Killed, progress=True)
    assert f"goes on after step {at}" in capsys.readouterr().out
    assert run.resumed_at == at
    assert run.step == 40
    for a, b in zip(undisturbed.state(), resumed.state(), strict=True):
        assert a.tobytes() == b.tobytes()
    logged = dict(recorded.logged)
    assert [step for step, _ in after.logged] == [step for step in range(4, 41, 4) if step > at]
    for step, values in after.logged[1:]:  # the first interval's metric began before
        assert values == logged[step]
    assert after.logged[0][1]["loss"] == logged[after.logged[0][0]]["loss"]


def test_the_metric_of_an_interval_goes_on_too(tmp_path: pathlib.Path, whole: Any) -> None:
    attempt(tmp_path / "parts", callbacks=[DiesAt(12)])
    _, after, run = attempt(tmp_path / "parts")
    assert run.resumed_at == 10
    # The metric's sums were shared out anew over the replicas, so its last bit may differ.
    expected = [(step, pytest.approx(values, rel=1e-6)) for step, values in whole[1].logged if step > 10]
    assert after.logged == expected


@pytest.mark.parametrize("kind", [pytest.param("one device", marks=pytest.mark.soak), "sharded 4"])
def test_a_run_goes_on_under_another_strategy(tmp_path: pathlib.Path, whole: Any, kind: str) -> None:
    attempt(tmp_path / "parts", steps=20)
    resumed, _, run = attempt(tmp_path / "parts", kind)
    assert run.resumed_at == 20
    np.testing.assert_allclose(whole[0].w.numpy(), resumed.w.numpy(), rtol=1e-4, atol=1e-5)
    assert int(resumed.seen.read_value()) == 40 * 8


def test_a_signal_while_the_last_step_is_saved_is_served_when_it_is(tmp_path: pathlib.Path) -> None:
    class Late(replicax.Callback):
        def on_save(self, run: replicax.TrainingRun, step: int) -> None:
            if step == run.steps:
                signal.raise_signal(signal.SIGTERM)

    _, recorder, error = attempt(tmp_path, steps=20, callbacks=[Late()])
    assert error.code == replicax.EXIT_PREEMPTED
    assert recorder.saved == [10, 20]
    _, _, run = attempt(tmp_path, steps=20)
    assert (run.resumed_at, run.step) == (20, 20)


def test_there_is_nothing_to_do_for_a_run_that_is_done(tmp_path: pathlib.Path, capsys: Any) -> None:
    _, _, done = attempt(tmp_path, steps=20, evaluate=lambda: 3.0)
    assert done.evaluation == {"loss": 3.0}
    for steps in (20, 15):
        _, recorder, run = attempt(tmp_path, steps=steps, progress=True, evaluate=lambda: 4.0)
        assert (run.step, run.numbers, run.evaluation) == (20, done.numbers, done.evaluation)
        assert recorder.calls == [("start", 20), ("end", 20)]
        assert (
            f"nothing to do: the checkpoint is of step 20, and there are to be {steps} steps" in capsys.readouterr().out
        )
    _, _, run = attempt(tmp_path, steps=25)
    assert (run.resumed_at, run.step) == (20, 25)


def test_the_last_step_is_saved_whatever_the_manager_waits_for(tmp_path: pathlib.Path) -> None:
    _, recorder, _ = attempt(tmp_path, steps=17, every=1000)
    assert recorder.saved == [17]
    assert recorder.calls[-2:] == [("save", 17, 17), ("end", 17)]


def test_callbacks_keep_their_states_when_those_of_other_classes_come_and_go(tmp_path: pathlib.Path) -> None:
    class Counter(replicax.Callback):
        count = 0

        def on_log(self, run: replicax.TrainingRun, step: int, values: Any) -> None:
            self.count += 1

        def get_state(self) -> int:
            return self.count

        def set_state(self, state: int) -> None:
            self.count = state

    first, second = Counter(), Counter()
    second.count = 100
    attempt(tmp_path, steps=10, log_every=1, callbacks=[first, Recorder(), second])
    assert (first.count, second.count) == (10, 110)
    first, second = Counter(), Counter()
    attempt(tmp_path, steps=12, log_every=1, callbacks=[Recorder(), Recorder(), first, second])
    assert (first.count, second.count) == (12, 112)


def test_each_early_stopping_has_the_state_of_its_metric(tmp_path: pathlib.Path) -> None:
    def bests(*names: str, steps: int) -> list[float | None]:
        callbacks = [replicax.EarlyStopping(name, "max", patience=9) for name in names]
        values = {"loss": 5.0, "accuracy": 0.5}
        attempt(tmp_path, evaluate=lambda: values, evaluate_every=10, callbacks=callbacks, steps=steps)
        return [callback.best for callback in callbacks]

    assert bests("loss", "accuracy", steps=10) == [5.0, 0.5]
    assert bests("accuracy", steps=20) == [0.5]


def test_a_run_that_early_stopping_has_ended_trains_no_further_without_more_patience(tmp_path: pathlib.Path) -> None:
    def ends(patience: int) -> Any:
        stopping = replicax.EarlyStopping("loss", "min", patience)
        _, _, run = attempt(tmp_path, evaluate=lambda: 1.0, evaluate_every=10, callbacks=[stopping], steps=100)
        return run.resumed_at, run.step, run.stopped

    why = "loss was no better than 1 (step 10) in 2 evaluations"
    assert [ends(2), ends(2), ends(3)[:2]] == [(None, 30, why), (30, 30, why), (30, 40)]


def judged_at(number: signal.Signals) -> Any:
    """An evaluation that a signal breaks off."""

    def judge(line: Line) -> Any:
        def step(batch: Any) -> Any:
            signal.raise_signal(number)  # while the step is traced
            return line.evaluate(batch)

        return step

    return judge


def test_an_evaluation_to_which_an_attempt_did_not_come_is_made_first(tmp_path: pathlib.Path) -> None:
    judge = judged_at(signal.SIGTERM)
    _, before, error = attempt(tmp_path, new=True, evaluate="by step", judge=judge, evaluate_every=10)
    assert error.code == replicax.EXIT_PREEMPTED
    assert before.evaluated == []
    assert before.saved == [10]

    class DiesWhenEvaluated(replicax.Callback):
        def on_evaluation(self, run: replicax.TrainingRun, step: int, values: Any) -> None:
            raise Killed

    logs = tmp_path / "logs"
    attempt(tmp_path, evaluate=lambda: 3.0, evaluate_every=10, logs=logs, callbacks=[DiesWhenEvaluated()])
    _, after, _ = attempt(tmp_path, evaluate=lambda: 1.0, evaluate_every=10, logs=logs)
    assert [step for step, _ in after.evaluated] == [10, 20, 30, 40]
    assert (logs / "evaluation.csv").read_text() == "step,loss\n10,1.0\n20,1.0\n30,1.0\n40,1.0\n"


@pytest.mark.parametrize("loss", [3.0, float("nan")])
def test_the_last_evaluation_is_made_once_by_runs_that_had_only_that_to_do(tmp_path: pathlib.Path, loss: float) -> None:
    best = {"best": ("loss", "min"), "steps": 20}
    _, before, error = attempt(tmp_path, new=True, evaluate="by step", judge=judged_at(signal.SIGINT), **best)
    assert (type(error), before.evaluated) == (KeyboardInterrupt, [])
    given = iter([loss, 2.0, 1.0])
    for evaluated in ([(20, {"loss": loss})], [], []):
        _, recorder, run = attempt(tmp_path, evaluate=lambda: next(given), **best)
        assert str((recorder.evaluated, run.evaluation)) == str((evaluated, {"loss": loss}))
    # A run that goes on from there tells its callbacks of an evaluation to which they did not come.
    _, recorder, _ = attempt(tmp_path, evaluate=lambda: next(given), evaluate_every=20, **best | {"steps": 21})
    assert recorder.evaluated[0] == (20, {"loss": 2.0})


def test_the_best_checkpoint_is_that_of_the_best_evaluation(tmp_path: pathlib.Path) -> None:
    values = iter([3.0, 1.0, 2.0, 2.0])
    _, recorder, _ = attempt(tmp_path, every=5, best=("loss", "min"), evaluate=lambda: next(values), evaluate_every=10)
    assert recorder.saved == list(range(5, 41, 5))
    line = Line(strategy_of(2))
    checkpoint = replicax.Checkpoint(w=line.w)
    manager = replicax.CheckpointManager(checkpoint, tmp_path, best=("loss", "min"))
    assert manager.best_step == 20
    with pytest.raises(ValueError, match=r"best=\('los', 'min'\) needs the metric 'los', got \['loss'\]"):
        attempt(tmp_path / "other", best=("los", "min"), evaluate=lambda: 3.0, evaluate_every=10)


def test_nothing_is_saved_after_a_number_that_is_not_finite(tmp_path: pathlib.Path) -> None:
    line = Line(strategy_of(2))
    count = []
    with line.strategy.scope():
        steps = replicax.Variable(0, name="steps", trainable=False)

    def step(batch: Any) -> Any:
        steps.assign_add(1)
        count.append(1)
        return {"loss": replicax.compute_average_loss(line.losses(batch)) / (steps.value != 19)}

    checkpoint = replicax.Checkpoint(steps=steps)
    options = {"log_every": 50, "stop_at_nan": True, "progress": False}
    with replicax.CheckpointManager(checkpoint, tmp_path, every_steps=5) as manager:
        for _ in range(2):  # the second one goes on from step 15
            with pytest.raises(FloatingPointError, match="step 19 "):
                replicax.train(step, line.dataset(), 100, checkpoints=manager, **options)
            manager.wait()
            assert manager.steps[-1] == 15


def test_files_of_a_run_have_each_step_once(tmp_path: pathlib.Path) -> None:
    logs = tmp_path / "logs"
    attempt(tmp_path / "run", logs=logs, callbacks=[DiesAt(28)])
    _, _, run = attempt(tmp_path / "run", logs=logs)
    rows = list(csv.DictReader((logs / "train.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == list(range(4, 41, 4))
    assert run.attempts == 2
    lost = run.wall_time_of_all_attempts["lost work"]
    assert lost > 0
    assert sum(run.wall_time_of_all_attempts.values()) > sum(run.wall_time.values()) + lost
    assert "wall time of 2 attempts" in run.time_table()
    attempt(tmp_path / "without logs", callbacks=[DiesAt(28)])
    assert attempt(tmp_path / "without logs")[2].attempts == 2


def test_what_comes_before_a_checkpoint_is_in_the_files_when_it_is_made(tmp_path: pathlib.Path) -> None:
    class DiesWhenSaved(replicax.Callback):
        def on_save(self, run: replicax.TrainingRun, step: int) -> None:
            raise Killed

    for _ in range(2):
        attempt(tmp_path / "run", log_every=10, logs=tmp_path / "logs", callbacks=[DiesWhenSaved()])
    rows = list(csv.DictReader((tmp_path / "logs" / "train.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == [10, 20]


def test_a_dataset_whose_place_cant_be_saved_is_refused_at_once(tmp_path: pathlib.Path) -> None:
    line, recorder = Line(strategy_of(2)), Recorder()
    dataset = line.dataset()
    source = dataset._pipeline.source
    dataset._pipeline.source = dataclasses.replace(source, unrepeatable="it is shuffled anew each time")
    assert "resume no: it is shuffled anew" in repr(dataset)
    manager = replicax.CheckpointManager(replicax.Checkpoint(w=line.w), tmp_path)
    with pytest.raises(ValueError, match="the place in this dataset can't be saved: it is shuffled anew"):
        replicax.train(line.step, dataset, 3, checkpoints=manager, callbacks=[recorder], progress=False)
    assert recorder.calls == []
    assert replicax.train(line.step, dataset, 8, progress=False).step == 8


def test_a_callback_whose_state_cant_be_saved_is_refused_before_the_first_step(tmp_path: pathlib.Path) -> None:
    class Best(replicax.Callback):
        def get_state(self) -> Any:
            return {"best": np.float32(3.0)}

    line = Line(strategy_of(2))
    with pytest.raises(TypeError, match=r"Best.get_state\(\) returned .*float32.* as JSON"):
        replicax.train(line.step, line.dataset(), 3, checkpoints=tmp_path, callbacks=Best(), progress=False)
    assert int(line.seen.read_value()) == 0


def test_a_name_that_the_loop_needs(tmp_path: pathlib.Path) -> None:
    line = Line(strategy_of(2))
    manager = replicax.CheckpointManager(replicax.Checkpoint(train=line.w), tmp_path)
    with pytest.raises(ValueError, match="has an object of that name already"):
        replicax.train(line.step, line.dataset(), 3, checkpoints=manager, progress=False)


def test_one_manager_for_several_runs_of_a_process(tmp_path: pathlib.Path) -> None:
    line = Line(strategy_of(2))
    manager = replicax.CheckpointManager(replicax.Checkpoint(w=line.w), tmp_path, every_steps=5)
    for steps in (5, 10, 15):
        run = replicax.train(line.step, line.dataset(), steps, checkpoints=manager, progress=False)
        assert run.step == steps
    assert run.resumed_at == 10
