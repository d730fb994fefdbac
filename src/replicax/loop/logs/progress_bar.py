"""Progress: a bar on a terminal, a line that is redrawn in a notebook, and a line now and then elsewhere."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from replicax.loop.callbacks import Callback
from replicax.loop.training_run import TrainingRun
from replicax.system.quantities import hours_in_words

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger("replicax")
LINES = 10.0
"""Seconds between two lines, where there is no terminal."""
REFRESH = 0.1
"""Seconds between two changes of the bar."""
REDRAWN = 0.5
"""Seconds between two changes of the line in a notebook."""
WIDTH = 24
"""Of the bar in that line, in characters."""


_Method = TypeVar("_Method", bound=Callable[..., None])


def _unless_broken(method: _Method) -> _Method:
    """Have a method of :class:`Progress` write no more once its output can't be written: training goes on."""

    @functools.wraps(method)
    def guarded(self: Progress, *args: Any, **kwargs: Any) -> None:
        try:
            if not self._is_broken:
                method(self, *args, **kwargs)
        except (OSError, ValueError, SystemExit) as error:  # the disk is full, the file closed; the pipe, says Rich
            why = error.__context__ if isinstance(error, SystemExit) else error
            if isinstance(error, SystemExit) and not isinstance(why, BrokenPipeError):  # the program's own end
                raise
            self._is_broken = self._console.quiet = True
            log.warning("the progress of the run can't be shown any more, and the run goes on: %s", why)
            if self._bar is not None:
                self._bar.stop()

    return cast(_Method, guarded)


class Progress(Callback):
    """Shows how far a run has come, on the chief; where there is no terminal, in a line every ``lines`` seconds.

    If that can't be written it logs so once, and shows nothing more.
    """

    def __init__(
        self,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        lines: float = LINES,
    ) -> None:
        from rich.console import Console  # takes a while to import

        self._console = console or Console(highlight=False, soft_wrap=True)
        self._clock = clock
        self._bar: Any = None
        self._task: Any = None
        self._lines = lines
        self._shown = self._numbered = -lines  # when a step, and numbers, were last shown
        self._began = 0.0
        self._first, self._steps = 0, 0
        self._last: tuple[int, str] = (-1, "")
        self._printed = -1
        self._run: TrainingRun | None = None  # whose line is redrawn
        self._numbers = ""
        self._drawn = 0  # how long that line is
        self._is_broken = False

    @_unless_broken
    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._run is None:
            self._console.print(line, markup=False, emoji=False)
            return
        self._write("")
        self._console.file.write(f"{line}\n")
        self._redraw()

    @_unless_broken
    def on_start(self, run: TrainingRun) -> None:
        self._began, self._first, self._steps = self._clock(), run.step, run.steps
        if self._console.is_jupyter:
            self._run = run
            self._redraw()
            return
        if not self._console.is_terminal:
            return
        from rich.columns import Columns
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.text import Text

        class Bar(Progress):
            """A bar, and the numbers in lines of their own below it, so that neither takes the other's space."""

            def get_renderables(self) -> Iterator[Any]:
                yield from super().get_renderables()
                for task in self.tasks:
                    yield Columns([Text(number) for number in task.fields["numbers"]], padding=(0, 3))

        self._bar = Bar(
            TextColumn("step {task.completed:,} of {task.total:,}"),
            BarColumn(),
            TimeRemainingColumn(compact=True),
            console=self._console,
            auto_refresh=False,  # an error in the thread that would redraw it could not be caught
        )
        self._task = self._bar.add_task("", total=run.steps, completed=run.step, numbers=())
        self._bar.start()

    @_unless_broken
    def advanced(self, step: int, is_logged: bool = False) -> None:
        """Show that steps have been launched; ``is_logged``: the numbers of the last one get a line later."""
        if self._bar is not None:
            now = self._clock()
            if now - self._shown > REFRESH:
                self._shown = now
                self._bar.update(self._task, completed=step, refresh=True)
        elif self._run is not None:
            if self._clock() - self._shown > REDRAWN:
                self._redraw()
        elif step < self._steps and not is_logged:  # the last step gets a line with its own numbers
            now = self._clock()
            if now - max(self._shown, self._began) >= self._lines:  # for so long nothing has been logged
                self._shown = now
                self._last = step, self._line(step, now)
                self._print_last()

    @_unless_broken
    def on_log(self, run: TrainingRun, step: int, values: Mapping[str, float]) -> None:
        self._numbers = described(values)
        if self._bar is not None:
            now = self._clock()
            if is_due := now - self._numbered > REFRESH:
                self._numbered = now
            self._bar.update(self._task, numbers=self._numbers.split("   "), refresh=is_due)
            return
        if self._run is not None:
            self._redraw()
            return
        now = self._clock()
        self._last = step, self._line(step, now)
        if step > self._printed and now - self._shown >= self._lines:
            self._shown = now
            self._print_last()

    @_unless_broken
    def on_evaluation(self, run: TrainingRun, step: int, values: Mapping[str, float]) -> None:
        if self._bar is None and self._run is None:
            self._print_last()
        self.say(f"step {step:,} of {run.steps:,}   evaluation: {described(values)}")

    @_unless_broken
    def on_end(self, run: TrainingRun) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=run.step)
            self._bar.stop()
            self._bar = None
        if self._run is not None:
            self._redraw()
            self._run, self._drawn = None, 0
            self._console.file.write("\n")
        self._print_last()

    def _line(self, step: int, now: float, bar: str = "") -> str:
        """Return the line that is shown where there is no terminal; in a notebook with a bar."""
        numbers = f"   {self._numbers}" if self._numbers else ""
        done, left = step - self._first, ""
        if done > 0 and step < self._steps:  # if they go on like this
            left = f"   {hours_in_words((now - self._began) / done * (self._steps - step))} left"
        return f"step {step:,} of {self._steps:,}{bar}{numbers}{left}"

    def _redraw(self) -> None:
        """Draw the line of a notebook anew."""
        run = self._run
        assert run is not None
        self._shown = self._clock()
        full = WIDTH * run.step // max(self._steps, 1)
        self._write(self._line(run.step, self._shown, " " + "━" * full + "─" * (WIDTH - full)))

    def _write(self, line: str) -> None:
        """Write over the line of a notebook."""
        file = self._console.file
        file.write(f"\r{line}{' ' * (self._drawn - len(line))}" + ("" if line else "\r"))
        file.flush()
        self._drawn = len(line)

    def _print_last(self) -> None:
        step, line = self._last
        if step > self._printed:
            self._printed = step
            self.say(line)


def described(values: Mapping[str, float]) -> str:
    """Numbers in a few words.

    >>> described({"loss": 0.123456, "accuracy": 1.0, "examples_per_second": 12345.6})
    'loss 0.1235   accuracy 1   12,346 examples/s'
    >>> described({"loss": 2.0, "tokens_per_second": 1e6, "mfu": 0.4321})
    'loss 2   1,000,000 tokens/s   43.2% MFU'
    >>> described({"of_plan": 0.97})
    "97.0% of the plan's speed"
    """
    speeds = {
        "examples_per_second": "{:,.0f} examples/s",
        "tokens_per_second": "{:,.0f} tokens/s",
        "mfu": "{:.1%} MFU",
        "of_plan": "{:.1%} of the plan's speed",
    }
    parts = [f"{name} {value:.4g}" for name, value in values.items() if name not in speeds]
    parts += [text.format(values[name]) for name, text in speeds.items() if name in values]
    return "   ".join(parts)
