"""How a run ends before its last step: early stopping, a file, a callback, a signal."""

from __future__ import annotations

import pathlib
import signal
import threading
import time
from typing import Any
from unittest.mock import Mock

import grain
import numpy as np
import pytest

import replicax
from tests.conftest import strategy_of
from tests.loop.models import Recorder


def train(steps: int = 1000, **kwargs: Any) -> replicax.TrainingRun:
    dataset = strategy_of(2).distribute_dataset([np.ones(4, np.float32)])
    return replicax.train(replicax.compute_average_loss, dataset, steps, **{"progress": False} | kwargs)


class When(replicax.Callback):
    """Does something when a step is logged."""

    def __init__(self, step: int, do: Any) -> None:
        self.step, self.do = step, do

    def on_log(self, run: replicax.TrainingRun, step: int, values: Any) -> None:
        if step == self.step:
            self.do(run)


@pytest.mark.parametrize(
    ("mode", "values", "patience", "min_delta", "ends"),
    [
        ("min", [3, 2, 2, 1, 1, 1, 1], 2, 0.0, 6),
        ("max", [3, 2, 4, 3, 3, 5, 0], 2, 0.0, 5),
        ("max", [3, 3.05, 3.1, 3.15, 9], 3, 0.5, 4),
        ("min", [float("nan"), 2, float("nan"), float("nan")], 2, 0.0, 4),
        ("min", [float("nan"), float("nan"), 1], 2, 0.0, 2),
    ],
)
def test_early_stopping(mode: Any, values: list[float], patience: int, min_delta: float, ends: int) -> None:
    coming = iter(values)
    stopping = replicax.EarlyStopping("value", mode, patience, min_delta)
    run = train(evaluate=lambda: {"value": next(coming)}, evaluate_every=10, callbacks=[stopping])
    assert run.step == 10 * ends
    assert "value was no better than" in str(run.stopped)


@pytest.mark.parametrize(
    ("args", "match"),
    [(("a", "less"), "mode"), (("a", "min", 0), "patience"), (("a", "min", 1, -1.0), "min_delta")],
)
def test_early_stopping_is_checked(args: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        replicax.EarlyStopping(*args)


def test_early_stopping_begins_anew_in_each_run() -> None:
    stopping = replicax.EarlyStopping("loss", "min", patience=2)
    for values in ([1.0, 2.0, 2.0], [5.0, 4.0, 4.0, 6.0]):
        coming = iter(values)
        run = train(evaluate=lambda coming=coming: next(coming), evaluate_every=1, callbacks=stopping)
        assert (run.step, stopping.best) == (len(values), min(values))


def test_early_stopping_by_the_numbers_of_steps_needs_no_evaluation() -> None:
    class ByLoss(replicax.EarlyStopping):
        on_log = replicax.EarlyStopping.on_evaluation

    assert train(log_every=10, callbacks=ByLoss("loss", "min", patience=2), steps_per_call=1).step < 100


def test_early_stopping_names_the_numbers_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"EarlyStopping\('accuracy'\).*it gives 'loss'"):
        train(1, evaluate=lambda: 1.0, callbacks=[replicax.EarlyStopping("accuracy", "max")])


def test_a_callback_may_end_the_run() -> None:
    recorder, stop = Recorder(), When(30, lambda run: [run.stop("enough"), run.stop("late")])
    run = train(log_every=10, callbacks=[stop, recorder], steps_per_call=1)
    assert (run.step, run.stopped) == (40, "enough")  # it was told one interval later
    assert [step for step, _ in recorder.logged] == [10, 20, 30, 40]
    assert recorder.calls[-1] == ("end", 40)
    assert repr(run) == "TrainingRun(step 40 of 1000, stopped: enough)"


EXAMPLES = [np.arange(4, dtype=np.float32)]


def test_a_run_that_is_stopped_is_evaluated_at_its_end(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "stop"
    for do in (lambda run: run.stop("enough"), lambda run: run.stop(None), lambda run: path.touch()):
        run = train(
            10**7,
            log_every=10,
            stop_file=path,
            callbacks=[When(10, do)],
            evaluate=(replicax.compute_average_loss, EXAMPLES),
        )
        assert (bool(run.stopped), run.evaluation) == (True, {"loss": 1.5})


def test_a_signal_breaks_off_the_evaluation_at_the_end_of_a_run_that_is_stopped() -> None:
    def judge(x: Any) -> Any:
        signal.raise_signal(signal.SIGINT)  # while the step is traced
        return replicax.compute_average_loss(x)

    recorder = Recorder()
    callbacks = [When(10, lambda run: run.stop("enough")), recorder]
    with pytest.raises(KeyboardInterrupt, match="the run was interrupted after step 20"):
        train(log_every=10, callbacks=callbacks, evaluate=(judge, EXAMPLES * 2), steps_per_call=1)
    assert recorder.evaluated == []


def test_all_callbacks_end_although_one_raises() -> None:
    class Raises(replicax.Callback):
        def on_end(self, run: replicax.TrainingRun) -> None:
            raise OSError("the disk is full")

    first, last = Recorder(), Recorder()
    with pytest.raises(OSError, match="the disk is full"):
        train(2, callbacks=[first, Raises(), last])
    assert first.calls[-1] == last.calls[-1] == ("end", 2)


def test_a_stop_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "stop"
    run = train(10**7, log_every=10, stop_file=path, callbacks=[When(10, lambda run: path.touch())])
    assert 10 < run.step < 10**7
    assert run.stopped == f"the file {path} is there"
    assert train(10**7, stop_file=path).step == 0


def test_ctrl_c_ends_the_run_after_the_step(capfd: Any, caplog: Any) -> None:
    recorder = Recorder()
    caplog.set_level("INFO", "replicax")
    raised = When(20, lambda run: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match="the run was interrupted after step 30"):
        train(log_every=10, callbacks=[raised, recorder], steps_per_call=1)
    assert recorder.calls[-1] == ("end", 30)
    assert recorder.logged[-1][0] == 30
    assert "Ctrl-C: the step ends, and then all is saved, if there are checkpoints" in capfd.readouterr().err
    assert "Ctrl-C: the run has stopped after step 30, which is not saved: there are no checkpoints" in caplog.text


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_that_comes_while_callbacks_end_is_not_lost(number: int, error: type[BaseException]) -> None:
    class Ends(replicax.Callback):
        def on_end(self, run: replicax.TrainingRun) -> None:
            signal.raise_signal(number)

    with pytest.raises(error, match="after step 10" if number == signal.SIGINT else "75"):
        train(10, callbacks=Ends())


def test_after_a_run_the_handlers_of_the_program_are_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    own = [lambda *_: None for _ in numbers]
    before = [signal.signal(number, handler) for number, handler in zip(numbers, own, strict=True)]
    try:
        train(3)
        assert [signal.getsignal(number) for number in numbers] == own
        for method, error in (("start", RuntimeError), ("join", KeyboardInterrupt)):
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, method, Mock(side_effect=error))
                with pytest.raises(error):
                    train(3, stop_file=tmp_path / "stop")
            assert [signal.getsignal(number) for number in numbers] == own
        with monkeypatch.context() as patch:
            patch.setattr(signal, "getsignal", lambda number: None)  # as of a handler that is not Python's
            train(3)
        assert {signal.getsignal(number) for number in numbers} == {signal.SIG_DFL}
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_ctrl_c_twice_ends_it_at_once() -> None:
    recorder = Recorder()

    def twice(run: replicax.TrainingRun) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it went on")

    with pytest.raises(KeyboardInterrupt):
        train(log_every=10, callbacks=[When(20, twice), recorder])
    assert [step for step, _ in recorder.logged] == [10]


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)])
def test_sigterm_counts_more_than_ctrl_c(numbers: tuple[int, int]) -> None:
    def both(run: replicax.TrainingRun) -> None:
        for number in numbers:
            signal.raise_signal(number)

    with pytest.raises(SystemExit) as ended:
        train(log_every=10, callbacks=[When(20, both)])
    assert ended.value.code == replicax.EXIT_PREEMPTED == 75


class Stalled:
    """A file system that is there no more after some examples: reading another one takes for ever."""

    def __init__(self, examples: int) -> None:
        self.examples, self.is_asked, self.is_back = examples, threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> np.ndarray:
        if index >= self.examples:
            self.is_asked.set()
            self.is_back.wait(60.0)
        return np.full(2, index, np.float32)


class SignalAt(replicax.Callback):
    """Sends this process a signal when a run has made some steps, and its source is asked for what does not come."""

    def __init__(self, step: int, source: Stalled, number: int) -> None:
        self.step, self.source, self.number = step, source, number

    def on_start(self, run: replicax.TrainingRun) -> None:
        def send() -> None:
            while run.step < self.step or not self.source.is_asked.is_set():
                time.sleep(0.01)
            signal.pthread_kill(threading.main_thread().ident or 0, self.number)

        threading.Thread(target=send, daemon=True).start()


@pytest.mark.covering(1)
@pytest.mark.parametrize("steps_per_call", [1, 3])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_waits_for_its_input_is_saved_and_resumed(
    tmp_path: pathlib.Path, number: int, steps_per_call: int
) -> None:
    """Storage stalls inside the sixth batch, where with three steps in a call two batches are there already."""
    source, at = Stalled(21), 5 if steps_per_call == 1 else 3
    seen: list[float] = []

    def run(source: Any, steps: int, *callbacks: replicax.Callback) -> replicax.TrainingRun:
        with strategy_of(2).scope():
            total = replicax.Variable(0.0, name="total", aggregation="sum")

        def step(batch: Any) -> Any:
            total.assign_add(batch[:, 0].sum())
            return replicax.compute_average_loss(batch[:, 0])

        try:
            return replicax.train(
                step,
                total.strategy.distribute_dataset(grain.MapDataset.source(source).batch(4)),
                steps,
                checkpoints=replicax.CheckpointManager(replicax.Checkpoint(total=total), tmp_path, every_steps=100),
                steps_per_call=steps_per_call,
                callbacks=callbacks,
                progress=False,
            )
        finally:
            seen.append(float(total))

    try:
        with pytest.raises(SystemExit if number == signal.SIGTERM else KeyboardInterrupt):
            run(source, 8, SignalAt(at, source, number))
        assert not source.is_back.is_set()
    finally:
        source.is_back.set()
    assert seen == [sum(range(4 * at))]
    resumed = run(Stalled(100), 8)
    assert (resumed.resumed_at, resumed.step) == (at, 8)
    assert seen[-1] == sum(range(32))


def test_an_evaluation_that_waits_for_its_input_ends_by_a_signal() -> None:
    source = Stalled(9)
    evaluation = lambda x: x.mean(), grain.MapDataset.source(source).batch(4)
    try:
        with pytest.raises(SystemExit):
            train(8, evaluate=evaluation, callbacks=[SignalAt(8, source, signal.SIGTERM)])
        assert not source.is_back.is_set()
    finally:
        source.is_back.set()


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"steps": -1}, ValueError, "steps must be an int of at least 0, got -1"),
        ({"steps": 1.5}, ValueError, "steps must be an int"),
        ({"log_every": 0}, ValueError, "log_every must be an int of at least 1"),
        ({"evaluate_every": 5}, ValueError, "pass evaluate, too"),
        ({"evaluate": 5}, TypeError, "must be a function without arguments"),
        ({"evaluate": (len, *np.ones((2, 9, 9)))}, TypeError, r"or \(step, dataset\), got \(<built-in.{69}…$"),
        ({"profile": (1, 2)}, ValueError, "pass logs, too"),
        ({"profile": 5, "logs": "unused"}, ValueError, "two steps, the second one larger"),
        ({"profile": (2, 1), "logs": "unused"}, ValueError, "two steps, the second one larger"),
        ({"callbacks": [replicax.EarlyStopping]}, TypeError, "pass an object, not the class"),
        (
            {"callbacks": replicax.EarlyStopping("loss", "min")},
            ValueError,
            "makes none: pass evaluate and evaluate_every",
        ),
        ({"callbacks": 3}, TypeError, "takes replicax.Callback objects, got 3"),
        ({"checkpoints": 3}, TypeError, "takes a folder, or a replicax.CheckpointManager, .*got 3"),
        (
            {"checkpoints": replicax.Checkpoint(model={"a": np.zeros(1)})},
            TypeError,
            r"CheckpointManager\(checkpoint, 'FOLDER', every_steps=…\)",
        ),
        ({"metrics": replicax.Mean("mean")}, TypeError, r"a list or dict of metrics, .*\[metric\]"),
        ({"metrics": [3]}, TypeError, "a name and the methods result"),
        ({"metrics": {"step": replicax.Mean("mean")}}, ValueError, "a number called 'step': .* another name"),
        ({"stop_file": "."}, ValueError, "stop_file must be the path of a file, got the folder '.'"),
        ({"strategy": "mirrored"}, TypeError, "must be a strategy or None"),
        ({"accumulate": 0}, ValueError, "replicax.train: accumulate must be an int of at least 1"),
        ({"tokens_per_example": 0}, ValueError, "tokens_per_example must be an int of at least 1"),
        ({"steps_per_call": True}, ValueError, r"steps_per_call=…\) must be an int of at least 1, or None to have it"),
        ({"progress": -1}, ValueError, "takes a bool, or seconds between two lines, got -1"),
        ({"progress": "bar"}, ValueError, "takes a bool, or seconds"),
    ],
)
def test_arguments_are_checked_before_anything_runs(kwargs: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        train(**kwargs)


def test_a_dataset_of_another_strategy_is_refused() -> None:
    dataset = strategy_of(2).distribute_dataset([np.ones(4)])
    with pytest.raises(ValueError, match="leave strategy out"):
        replicax.train(lambda x: x.sum(), dataset, 1, strategy=strategy_of(2))
    other = strategy_of(2).distribute_dataset([np.ones(4)])
    with pytest.raises(ValueError, match="distribute it with that one"):
        replicax.train(lambda x: x.sum(), dataset, 1, evaluate=(lambda x: x.sum(), other))
