"""``EarlyStopping(restore_best=True)``: at the end the model is the one of the best evaluation."""

from __future__ import annotations

import pathlib
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import replicax
from tests.conftest import strategy_of
from tests.loop.models import Recorder

LOSSES = {2: 3.0, 4: 1.0, 6: 2.0, 8: 1.5, 10: 5.0}


class Counter:
    """A model that is the number of its steps."""

    def __init__(self) -> None:
        self.strategy = strategy_of(2)
        with self.strategy.scope():
            self.count = replicax.Variable(0, name="count", trainable=False)

    def step(self, x: Any) -> Any:
        self.count.assign(self.count.value + 1)
        return x.sum()

    def train(
        self, stopping: Any, checkpoints: Any, steps: int = 20, losses: Any = LOSSES, evaluate: Any = None
    ) -> replicax.TrainingRun:
        return replicax.train(
            self.step, self.strategy.distribute_dataset([np.ones(4, np.float32)]), steps, callbacks=stopping,
            checkpoints=checkpoints, evaluate=evaluate or (lambda: {"loss": losses[int(self.count)]}), evaluate_every=2,
        )  # fmt: skip


def stopping(**kwargs: Any) -> replicax.EarlyStopping:
    return replicax.EarlyStopping("loss", "min", restore_best=True, **kwargs)


def test_the_model_of_the_best_evaluation_comes_back(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Counter()
    run = model.train(stopping(patience=2), tmp_path)
    assert (run.step, run.restored, int(model.count)) == (8, 4, 4)
    assert "no better than 1 (step 4)" in (run.stopped or "")
    assert "restored the best checkpoint, of step 4\n" in capsys.readouterr().out


def test_so_it_does_after_a_resume_and_the_next_run_goes_on_from_the_last_step(tmp_path: pathlib.Path) -> None:
    Counter().train(stopping(patience=3), tmp_path, steps=6)
    model = Counter()
    run = model.train(stopping(patience=3), tmp_path)
    assert (run.resumed_at, run.step, run.restored, int(model.count)) == (6, 10, 4, 4)
    assert Counter().train(None or [], tmp_path, steps=10).resumed_at == 10


def test_the_last_one_is_left_if_it_is_the_best(tmp_path: pathlib.Path) -> None:
    model, recorder = Counter(), Recorder()
    run = model.train([stopping(), recorder], tmp_path, steps=4)
    assert (run.step, run.restored, int(model.count)) == (4, None, 4)
    assert recorder.saved == [2, 4]


def test_a_manager_keeps_the_best_one(tmp_path: pathlib.Path) -> None:
    model = Counter()
    checkpoint = replicax.Checkpoint(count=model.count)
    manager = replicax.CheckpointManager(checkpoint, tmp_path, max_to_keep=1, best=("loss", "min"))
    assert model.train(stopping(patience=2), manager).restored == 4
    assert int(model.count) == 4


def test_there_must_be_a_checkpoint_of_it(tmp_path: pathlib.Path) -> None:
    model = Counter()
    checkpoint = replicax.Checkpoint(count=model.count)
    for checkpoints in (None, replicax.CheckpointManager(checkpoint, tmp_path)):
        with pytest.raises(ValueError, match=r"restores the best checkpoint .*best=\('loss', 'min'\)"):
            model.train(stopping(), checkpoints)
    with pytest.raises(ValueError, match="only one can restore"):
        model.train([stopping(), stopping()], tmp_path)


def test_the_step_that_a_run_goes_on_from_is_not_saved_twice_if_it_is_the_best(tmp_path: pathlib.Path) -> None:
    first = Counter()
    dataset = first.strategy.distribute_dataset([np.ones(4, np.float32)])
    replicax.train(first.step, dataset, 4, checkpoints=tmp_path, progress=False)
    run = Counter().train(stopping(), tmp_path, losses={4: 1.0, 6: 2.0})
    assert (run.resumed_at, run.step) == (4, 6)


@pytest.mark.parametrize("steps", [4, 20])
def test_the_best_evaluation_may_be_one_that_was_broken_off_and_made_after_the_resume(
    tmp_path: pathlib.Path, steps: int
) -> None:
    evaluated: list[int] = []
    models: list[Counter] = []

    def attempt(signal_at: int | None = None) -> replicax.TrainingRun:
        model = Counter()
        models.append(model)

        def batches() -> Iterator[np.ndarray]:
            evaluated.append(int(model.count))
            yield np.full(4, LOSSES[evaluated[-1]], np.float32)
            if evaluated[-1] == signal_at:
                signal.raise_signal(signal.SIGINT)
            yield np.full(4, LOSSES[evaluated[-1]], np.float32)

        evaluate = replicax.compute_average_loss, model.strategy.distribute_dataset(batches)
        return model.train(stopping(patience=3), manager_of(model), steps, evaluate=evaluate)

    def manager_of(model: Counter) -> replicax.CheckpointManager:
        checkpoint = replicax.Checkpoint(count=model.count)
        return replicax.CheckpointManager(checkpoint, tmp_path, max_to_keep=1, every_steps=100, best=("loss", "min"))

    with pytest.raises(KeyboardInterrupt):
        attempt(signal_at=4)
    assert int(models[0].count) == 4  # the run is not over
    run = attempt()
    assert (run.resumed_at, run.restored) == (4, 4 if steps > 4 else None)
    assert evaluated == [2, 4, 4, 6, 8, 10][: 6 if steps > 4 else 3]
    assert manager_of(Counter()).best_step == 4


def test_the_best_evaluation_may_be_that_of_a_step_that_was_saved_before_a_callback_ended_the_run(
    tmp_path: pathlib.Path,
) -> None:
    class Ends(replicax.Callback):
        def on_save(self, run: replicax.TrainingRun, step: int) -> None:
            if step == 3:
                run.stop("enough")

    model = Counter()
    checkpoint = replicax.Checkpoint(count=model.count)
    manager = replicax.CheckpointManager(checkpoint, tmp_path, every_steps=3, best=("loss", "min"))
    run = model.train([stopping(), Ends()], manager, losses={2: 3.0, 3: 2.0})
    assert (run.step, run.restored, manager.best_step) == (3, None, 3)
