"""What workers do in ``test_workers_end_together.py``."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax
from replicax import _jax


class At(replicax.Callback):
    """Does something when a step has been logged, on one worker."""

    def __init__(self, step: int, worker: int, do: Any) -> None:
        self.step, self.worker, self.do = step, worker, do
        self.evaluated: list[Any] = []

    def on_log(self, run: replicax.TrainingRun, step: int, values: Any) -> None:
        if step == self.step and jax.process_index() == self.worker:
            self.do(run)

    def on_evaluation(self, run: replicax.TrainingRun, step: int, values: Any) -> None:
        self.evaluated.append(values)


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


def outcome(train: Any, total: replicax.Variable) -> tuple[str, float]:
    """How ``train()`` ends, and the sum that its steps have made."""
    try:
        run = train()
    except SystemExit as error:
        return f"exit {error.code}", float(total)
    except KeyboardInterrupt:
        return "interrupt", float(total)
    return f"{run.stopped} at {run.step}", float(total)


def counted() -> tuple[replicax.Variable, Any, Any]:
    """A variable that counts steps, the step, and a dataset that takes longer than any test."""
    strategy = replicax.MultiWorkerMirroredStrategy()
    with strategy.scope():
        total = replicax.Variable(0.0, name="total", aggregation="sum")

    def step(x: Any) -> Any:
        total.assign_add(jnp.ones(()))
        return replicax.compute_average_loss(x)

    examples = strategy.make_numpy_dataset(np.arange(8, dtype=np.float32)).batch(4).repeat(10**9)
    return total, step, strategy.distribute_dataset(examples)


class StopsAtStart(replicax.Callback):
    """Worker 1 ends the run before its first step."""

    def on_start(self, run: replicax.TrainingRun) -> None:
        if jax.process_index() == 1:
            run.stop("done before")


def stops() -> list[Any]:
    """One run after the other, each ended by something that happens to one worker only."""
    replicas = float(jax.device_count())
    ends = []
    for at in (
        At(50, 0, lambda run: run.stop("enough")),
        At(50, 1, lambda run: run.stop("enough")),
        At(50, 1, lambda run: kill(signal.SIGINT)),
    ):
        total, step, dataset = counted()
        evaluate = replicax.compute_average_loss, [np.arange(8, dtype=np.float32)] * 3
        how, steps = outcome(
            lambda step=step, dataset=dataset, at=at, evaluate=evaluate: replicax.train(
                step, dataset, 10**6, log_every=10, callbacks=[at], evaluate=evaluate, progress=False
            ),
            total,
        )
        ends.append((how.split(" at ")[0], steps / replicas, at.evaluated))
    total, step, dataset = counted()
    asked: list[int] = []

    def evaluate() -> dict[str, float]:
        asked.append(1)
        return {"loss": 1.0}

    stopping = replicax.EarlyStopping("loss", "min", patience=3)
    run = replicax.train(
        step, dataset, 1000, log_every=10, evaluate=evaluate, evaluate_every=20, callbacks=[stopping], progress=False
    )
    ends.append((run.stopped, run.step))
    run = replicax.train(step, dataset, 1000, callbacks=[StopsAtStart()], progress=False)
    ends.append((run.stopped, run.step))
    whole = replicax.train(step, dataset, 30, log_every=10, progress=False)
    return [*ends, (whole.step, whole.numbers["loss"])]


class Stalled:
    """60 rows, after which no worker gets another one before a worker's run has ended, by its SIGTERM."""

    def __init__(self) -> None:
        self.is_asked, self.is_over = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        if index >= 60:
            if jax.process_index() == 1 and not self.is_asked.is_set():
                self.is_asked.set()
                time.sleep(2.0)  # until the steps have had all the rows before
                kill(signal.SIGTERM)
            self.is_over.wait(30.0)
        return np.float32(index)


def preempted(when: str) -> tuple[str, float]:
    """SIGTERM to worker 1, at some moment."""
    total, step, dataset = counted()
    is_hit = jax.process_index() == 1
    kwargs: dict[str, Any] = {}
    fn = step
    if when == "before":
        if is_hit:
            kill(signal.SIGTERM)
        while not _jax.preemption_notice(_jax.coordination_client()):  # JAX looks for the signal once a second
            time.sleep(0.05)
    if when == "compile":

        def fn(x: Any) -> Any:
            if is_hit:  # while the step is traced
                kill(signal.SIGTERM)
                time.sleep(0.5)
            return step(x)

    rows = Stalled()
    if when == "input":
        dataset = grain.MapDataset.source(rows).batch(4)
        kwargs["strategy"] = total.strategy
    if when in ("step", "run_steps"):
        kwargs["steps_per_call"] = 1 if when == "step" else 5
        kwargs["callbacks"] = [At(100, 1, lambda run: kill(signal.SIGTERM))]
    if when == "evaluation":

        def judge(x: Any) -> Any:
            return replicax.compute_average_loss(x)

        evaluated = dataset
        kwargs["evaluate"], kwargs["evaluate_every"] = (judge, evaluated), 20  # which takes too long
        kwargs["callbacks"] = [At(20, 1, lambda run: kill(signal.SIGTERM))]
    if when == "last evaluation":

        def judge_last(x: Any) -> Any:
            if is_hit:  # while the step is traced
                kill(signal.SIGTERM)
            return replicax.compute_average_loss(x)

        kwargs["evaluate"] = judge_last, dataset
        kwargs["callbacks"] = [At(20, 0, lambda run: run.stop("enough"))]
    how, steps = outcome(lambda: replicax.train(fn, dataset, 10**6, log_every=10, progress=False, **kwargs), total)
    assert not rows.is_over.is_set()
    rows.is_over.set()
    return how, steps / jax.device_count()


def saved(folder: str, when: str | None, steps: int) -> tuple[str, list[int], list[tuple[int, float]], bytes]:
    """A run with checkpoints, in which worker 1 gets a SIGTERM at some moment; ``None``: nobody gets one.

    Returns:
      How it has ended, the steps that were saved, the losses that were logged, and the parameter.
    """
    strategy = replicax.MultiWorkerMirroredStrategy()
    with strategy.scope():
        w = replicax.Variable(np.ones(3, np.float32), name="w")
        optimizer = replicax.Optimizer(optax.adam(0.1))
    data = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)

    def step(x: Any) -> Any:
        def loss() -> Any:
            return replicax.compute_average_loss(jnp.square(x @ w.value))

        share, [gradient] = replicax.value_and_grad(loss, [w])()
        optimizer.apply_gradients([(gradient, w)])
        return share

    class Hit(replicax.Callback):
        def __init__(self) -> None:
            self.saved: list[int] = []
            self.losses: list[tuple[int, float]] = []

        def on_save(self, run: replicax.TrainingRun, step: int) -> None:
            self.saved.append(step)
            if when == "saving" and step == 20 and jax.process_index() == 1:
                kill(signal.SIGTERM)

        def on_log(self, run: replicax.TrainingRun, step: int, values: Any) -> None:
            self.losses.append((step, values["loss"]))
            if when == "saving":
                time.sleep(0.2)  # so that not many steps are left to do again, until JAX has seen the signal

    hit = Hit()
    checkpoint = replicax.Checkpoint(w=w, optimizer=optimizer)
    manager = replicax.CheckpointManager(checkpoint, folder, every_steps=10)
    dataset = strategy.distribute_dataset(strategy.make_numpy_dataset(data).seed(5).shuffle().batch(8).repeat())
    if when == "restoring" and jax.process_index() == 1:
        restore = checkpoint._restore_from

        def hit_restore(*args: Any) -> None:
            restore(*args)
            kill(signal.SIGTERM)

        checkpoint.__dict__["_restore_from"] = hit_restore
    try:
        run = replicax.train(
            step,
            dataset,
            steps,
            checkpoints=manager,
            logs=folder,
            log_every=10,
            callbacks=[hit],
            progress=False,
            steps_per_call=1 if when else None,
        )
        how = f"resumed at {run.resumed_at}"
    except SystemExit as error:
        how = f"exit {error.code}"
    return how, hit.saved, hit.losses, w.numpy().tobytes()
