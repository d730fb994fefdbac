"""The example that commands run: found on disk, and trained with its own step."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

import replicax


def load_example(name: str) -> ModuleType:
    """The module ``examples/<name>.py``, as it was installed or as it stands in the checkout.

    Raises:
      FileNotFoundError: it is in neither place.
    """
    package = Path(replicax.__file__).parent
    places = [package / "_examples" / f"{name}.py", package.parents[1] / "examples" / f"{name}.py"]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise FileNotFoundError(f"the example {name}.py is in neither {places[0]} nor {places[1]}")
    spec = importlib.util.spec_from_file_location(f"replicax_example_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a training has come; loss, accuracy and speed are those of the last whole epoch."""

    step: int
    epoch: int
    loss: float | None
    accuracy: float | None
    examples_per_second: float | None


@dataclasses.dataclass
class Training:
    """What a training leaves behind.

    Attributes:
      losses: of each step, the mean over the global batch.
      accuracies: on the whole test set, after each epoch.
      seconds: from the first step to the last, with tracing, compiling and evaluating.
      examples_per_second: in training steps after the first one, which is traced and compiled.
      early_step: the step (counted from 1) after which ``early`` was taken.
      early: the variables' values after that step.
      variables: the variables, as the training left them.
      traces: how often the Python of the step ran to be traced.
      collectives: those of the compiled step.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    accuracies: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    examples_per_second: float = 0.0
    early_step: int = 0
    early: list[np.ndarray[Any, Any]] = dataclasses.field(default_factory=list)
    variables: list[replicax.Variable] = dataclasses.field(default_factory=list)
    traces: int = 0
    collectives: list[replicax.Collective] = dataclasses.field(default_factory=list)


def train(
    example: ModuleType,
    strategy: replicax.Strategy,
    data: tuple[Any, Any],
    *,
    seed: int,
    epochs: int,
    early_step: int,
    report: Callable[[Progress], None],
) -> Training:
    """The loop of the example, with an eye on it.

    Args:
      example: the module ``examples/digits.py``.
      strategy: where to train.
      data: what ``example.load_data()`` returned.
      seed: of the initial values, the order of the examples and their shifts.
      epochs: how many.
      early_step: after which step to keep a copy of the variables; the last one if there are fewer.
      report: called after each step.
    """
    training_data, test = data
    steps_per_epoch = len(training_data[0]) // example.BATCH
    total = epochs * steps_per_epoch
    result = Training(early_step=min(early_step, total))
    with strategy.scope():
        result.variables, train_step, count_correct = example.build(seed=seed, steps=total)
    batches = strategy.distribute_dataset(example.global_batches(strategy, training_data, seed, epochs))

    losses: list[Any] = []
    progress = Progress(0, 1, None, None, None)
    training_seconds = 0.0
    begin = start = time.perf_counter()
    for step, batch in enumerate(batches, start=1):
        losses.append(strategy.run(train_step, args=(batch,)))
        if step == 1:
            jax.block_until_ready(strategy.local_results(losses[0]))  # compiled: now the clock can start
            start = time.perf_counter()
        if step == result.early_step:
            result.early = [v.numpy() for v in result.variables]
        epoch, position = divmod(step - 1, steps_per_epoch)
        if position == steps_per_epoch - 1:
            jax.block_until_ready(strategy.local_results(losses[-1]))
            training_seconds += time.perf_counter() - start
            of_epoch = [float(loss) for loss in strategy.reduce("sum", losses)]
            result.losses += of_epoch
            result.accuracies.append(example.evaluate(strategy, count_correct, test))
            result.examples_per_second = (step - 1) * example.BATCH / training_seconds
            progress = Progress(
                step, epoch + 1, float(np.mean(of_epoch)), result.accuracies[-1], result.examples_per_second
            )
            losses, start = [], time.perf_counter()
        report(dataclasses.replace(progress, step=step, epoch=epoch + 1))
    result.seconds = time.perf_counter() - begin

    result.traces = strategy.extended.trace_count(train_step)
    result.collectives = strategy.extended.trace(train_step, args=(batch,)).collectives()
    return result
