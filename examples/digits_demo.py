"""The demo, which ``replicax demo`` starts: train the network of ``digits.py`` twice, and compare.

Once with a strategy, once on one device: from the same initial values, on the same batches. ``run`` trains; the report
that it returns has a table of what was measured and what is promised, and draws the pictures.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich.console
from rich import box, progress
from rich.table import Table

import replicax

from . import digits, digits_pictures

MIN_ACCURACY = 0.97
MAX_SECONDS = 60.0
EARLY_STEP = 20
MAX_PARAMETER_DIFFERENCE = 1e-5
MAX_ACCURACY_DIFFERENCE = 0.5  # in points of a hundred
PICTURES = ("training.png", "replicas.png")


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
    early: list[np.ndarray] = dataclasses.field(default_factory=list)
    variables: list[replicax.Variable] = dataclasses.field(default_factory=list)
    traces: int = 0
    collectives: list[replicax.Collective] = dataclasses.field(default_factory=list)

    def bytes_of(self, kind: str) -> list[int]:
        """The sizes of the step's collectives of one kind."""
        return [c.bytes for c in self.collectives if c.kind == kind]


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the report: what was measured, with the strategy and on one device; what was promised; is it kept?"""

    what: str
    shown: str
    reference: str = ""
    target: str = ""
    met: bool = True


@dataclasses.dataclass(frozen=True)
class Report:
    """Two trainings, compared.

    Attributes:
      title: what was trained, and on what.
      strategy: the one to show.
      name: what to call the training with that strategy.
      ours: the training with that strategy.
      reference: the same training on one device.
      images: the first global batch, ``[batch, height, width, 1]``.
      by_default: whether it ran for the default number of epochs. How well it learns, and how fast, is promised
        for that only; that strategies learn the same is promised always.
    """

    title: str
    strategy: replicax.Strategy
    name: str
    ours: Training
    reference: Training
    images: np.ndarray
    by_default: bool

    def rows(self) -> list[Row]:
        """What was measured, against what is promised."""
        a, b = self.ours, self.reference
        accuracy, points = a.accuracies[-1], 100 * abs(a.accuracies[-1] - b.accuracies[-1])
        difference = max(float(np.max(np.abs(x - y))) for x, y in zip(a.early, b.early, strict=True))
        wanted, closer = f"at least {MIN_ACCURACY:.0%}", f"below {MAX_ACCURACY_DIFFERENCE} points"
        seconds, tiny = f"below {MAX_SECONDS:.0f} s", f"below {MAX_PARAMETER_DIFFERENCE:.0e}".replace("e-0", "e-")
        by_default = [
            Row("Test accuracy", f"{accuracy:.2%}", f"{b.accuracies[-1]:.2%}", wanted, accuracy >= MIN_ACCURACY),
            Row("Final accuracy differs by", f"{points:.2f} points", "", closer, points < MAX_ACCURACY_DIFFERENCE),
            Row("Training time", f"{a.seconds:.1f} s", f"{b.seconds:.1f} s", seconds, a.seconds < MAX_SECONDS),
        ]
        others = collections.Counter(c.kind for c in a.collectives if c.kind != "all-reduce")
        ours, theirs = a.bytes_of("all-reduce"), b.bytes_of("all-reduce")
        parameter = f"Largest difference of a parameter after {a.early_step} steps"
        return [
            *(row if self.by_default else dataclasses.replace(row, target="", met=True) for row in by_default),
            Row("Examples per second", f"{a.examples_per_second:,.0f}", f"{b.examples_per_second:,.0f}"),
            Row("Times the step was traced", str(a.traces), str(b.traces), "1", a.traces == 1),
            Row("All-reduces per step", str(len(ours)), str(len(theirs))),
            Row("Bytes reduced per step", f"{sum(ours):,}", f"{sum(theirs):,}"),
            *(Row(f"{kind.capitalize()}s per step", str(count), "0") for kind, count in sorted(others.items())),
            Row(parameter, f"{difference:.1e}", "", tiny, difference < MAX_PARAMETER_DIFFERENCE),
        ]

    def missed(self) -> list[str]:
        """The promises that were not kept, in words."""
        return [f"{row.what}: {row.shown}, should be {row.target}" for row in self.rows() if not row.met]

    def table(self) -> Table:
        """The rows, for the terminal."""
        title = "The same training, twice"
        drawn = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        drawn.add_column("", max_width=32)
        for heading in (self.name, "one device", "target"):
            drawn.add_column(heading, justify="right", no_wrap=True)
        drawn.add_column("")
        for row in self.rows():
            mark = "" if not row.target else "[green]met[/]" if row.met else "[red]missed[/]"
            shown = row.shown if row.met else f"[red]{row.shown}[/]"
            drawn.add_row(row.what, shown, row.reference, row.target, mark)
        return drawn

    def draw(self, picture: str, path: Path) -> None:
        """Draw one of ``PICTURES`` to a PNG."""
        if picture == "training.png":
            trainings = {self.name: self.ours, "one device": self.reference}
            target = MIN_ACCURACY if self.by_default else None
            digits_pictures.draw_training(path, trainings, title=self.title, target=target)
        else:
            digits_pictures.draw_replicas(path, self.strategy, self.images, self.ours, title=self.title)


def run(strategy: replicax.Strategy, console: rich.console.Console, seed: int, epochs: int | None = None) -> Report:
    """Train with ``strategy`` and on its first device, for so many epochs or those of the example."""
    devices = strategy.extended.worker_devices
    name = _count(len(devices), "replica")
    kind = "emulated CPU" if devices[0].platform == "cpu" else devices[0].device_kind
    title = f"Handwritten digits: {name} on {_count(len(devices), f'{kind} device')}"
    console.print(f"[bold]{title}[/]")

    data = digits.load_data()
    epochs = epochs or digits.EPOCHS
    # Some accelerators multiply float32 with fewer bits by default; then rounding would hide what we compare.
    with jax.default_matmul_precision("float32"):
        ours = train(name, strategy, data, seed, epochs, console)
        reference = train("one device", replicax.OneDeviceStrategy(devices[0]), data, seed, epochs, console)
    images, _ = digits.global_batches(strategy, data[0], seed, epochs)[0]
    return Report(title, strategy, name, ours, reference, images, by_default=epochs == digits.EPOCHS)


def train(
    label: str,
    strategy: replicax.Strategy,
    data: tuple[Any, Any],
    seed: int,
    epochs: int,
    console: rich.console.Console,
) -> Training:
    """The loop of ``digits.py``, watched; with a progress bar, or one line at the end where there is no terminal."""
    examples, test = data
    steps_per_epoch = len(examples[0]) // digits.BATCH
    total = epochs * steps_per_epoch
    result = Training(early_step=min(EARLY_STEP, total))
    with strategy.scope():
        result.variables, train_step, count_correct = digits.build(seed=seed, steps=total)
    batches = strategy.distribute_dataset(digits.global_batches(strategy, examples, seed, epochs))

    columns = [
        progress.TextColumn("[bold]{task.description}"),
        progress.BarColumn(bar_width=max(10, min(40, console.width - 70))),
        progress.TextColumn("{task.fields[status]}"),
    ]
    losses, last_epoch, training_seconds = [], "", 0.0
    with progress.Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total, status="compiling")
        begin = start = time.perf_counter()
        for step, batch in enumerate(batches, start=1):
            losses.append(strategy.run(train_step, args=(batch,)))
            if step == 1:
                jax.block_until_ready(strategy.local_results(losses[0]))  # compiled: now the clock can start
                start = time.perf_counter()
            if step == result.early_step:
                result.early = [v.numpy() for v in result.variables]
            if step % steps_per_epoch == 0:
                jax.block_until_ready(strategy.local_results(losses[-1]))
                training_seconds += time.perf_counter() - start
                result.losses += [float(loss) for loss in strategy.reduce("sum", losses)]
                result.accuracies.append(digits.evaluate(strategy, count_correct, test))
                result.examples_per_second = (step - 1) * digits.BATCH / training_seconds
                last_epoch = (
                    f"  loss {np.mean(result.losses[-steps_per_epoch:]):.3f}  test {result.accuracies[-1]:.2%}"
                    f"  {result.examples_per_second:,.0f} examples/s"
                )
                losses, start = [], time.perf_counter()
            epoch = -(-step // steps_per_epoch)
            bar.update(task, completed=step, status=f"epoch {epoch}/{epochs}{last_epoch}")
        result.seconds = time.perf_counter() - begin
    if not console.is_terminal:
        console.print(f"{label}: {_count(epochs, 'epoch')} in {result.seconds:.1f} s")

    result.traces = strategy.extended.trace_count(train_step)
    result.collectives = strategy.extended.trace(train_step, args=(batch,)).collectives()
    return result


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"
