"""Progress: a bar on a terminal, and a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from replicax.loop.callbacks import Callback
from replicax.loop.training_run import TrainingRun

if TYPE_CHECKING:
    from rich.console import Console

LINES = 10.0
"""Seconds between two lines, where there is no terminal."""
REFRESH = 0.1
"""Seconds between two changes of the bar."""


class Progress(Callback):
    """Shows how far a run has come, on the chief.

    Args:
      console: where; ``None``: standard output.
      clock: gives the time in seconds.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console  # takes a while to import

        self._console = console or Console(highlight=False, soft_wrap=True)
        self._clock = clock
        self._bar: Any = None
        self._task: Any = None
        self._shown = -LINES
        self._began = 0.0
        self._first = 0
        self._last: tuple[int, str] = (-1, "")
        self._printed = -1

    def say(self, line: str) -> None:
        """A line, above the bar if there is one."""
        self._console.print(line, markup=False)

    def on_start(self, run: TrainingRun) -> None:
        self._began, self._first = self._clock(), run.step
        if not self._console.is_terminal:
            return
        from rich.columns import Columns
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        class Bar(Progress):
            """A bar, and the numbers in lines of their own below it: so neither takes the other's room."""

            def get_renderables(self) -> Iterator[Any]:
                yield from super().get_renderables()
                for task in self.tasks:
                    yield Columns(task.fields["numbers"], padding=(0, 3))

        self._bar = Bar(
            TextColumn("step {task.completed:,} of {task.total:,}"),
            BarColumn(),
            TimeRemainingColumn(compact=True),
            console=self._console,
        )
        self._task = self._bar.add_task("", total=run.steps, completed=run.step, numbers=())
        self._bar.start()

    def advanced(self, step: int) -> None:
        """Steps have been launched."""
        if self._bar is not None:
            now = self._clock()
            if now - self._shown > REFRESH:
                self._shown = now
                self._bar.update(self._task, completed=step)

    def on_log(self, run: TrainingRun, step: int, values: Mapping[str, float]) -> None:
        shown = described(values)
        if self._bar is not None:
            self._bar.update(self._task, numbers=shown.split("   "))
            return
        now = self._clock()
        line = f"step {step:,} of {run.steps:,}   {shown}"
        done = step - self._first
        if done > 0 and step < run.steps:
            line += f"   {_duration((now - self._began) / done * (run.steps - step))} left"
        self._last = step, line
        if now - self._shown >= LINES:
            self._shown = now
            self._print_last()

    def on_evaluation(self, run: TrainingRun, step: int, values: Mapping[str, float]) -> None:
        if self._bar is None:
            self._print_last()
        self.say(f"step {step:,} of {run.steps:,}   evaluation: {described(values)}")

    def on_end(self, run: TrainingRun) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=run.step)
            self._bar.stop()
            self._bar = None
        self._print_last()

    def _print_last(self) -> None:
        step, line = self._last
        if step > self._printed:
            self._printed = step
            self.say(line)


def described(values: Mapping[str, float]) -> str:
    """Numbers in a few words.

    >>> from replicax.loop.logs.progress_bar import described
    >>> described({"loss": 0.123456, "accuracy": 1.0, "examples_per_second": 12345.6})
    'loss 0.1235   accuracy 1   12,346 examples/s'
    """
    parts = [f"{name} {value:.4g}" for name, value in values.items() if name != "examples_per_second"]
    if "examples_per_second" in values:
        parts.append(f"{values['examples_per_second']:,.0f} examples/s")
    return "   ".join(parts)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
