"""``train``: the loop that runs a step over a dataset, and all that belongs to a run that lasts."""

from __future__ import annotations

import collections
import contextlib
import logging
import operator
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax

from replicax import _jax, context
from replicax.collectives import ReduceOp
from replicax.data import DistributedDataset, DistributedIterator
from replicax.execution.many_steps.loop import run_steps
from replicax.execution.many_steps.step_outputs import MultiStepContext
from replicax.execution.run import check_call
from replicax.exit_codes import EXIT_PREEMPTED
from replicax.loop.attempts import Attempts
from replicax.loop.callbacks import Callback
from replicax.loop.endless_input import EndlessInput
from replicax.loop.metric_files import CSVLog, TensorBoardLog, can_write_events
from replicax.loop.periodic_evaluation import Evaluation, InterruptedEvaluation
from replicax.loop.progress_bar import Progress
from replicax.loop.saved_runs import SavedRuns
from replicax.loop.step_numbers import DONE, Combination, FiniteWatch, NumberedStep, Pending
from replicax.loop.steps_per_call import StepsPerCall
from replicax.loop.stop_requests import INTERRUPTED, PREEMPTED, SIGNALS, StopRequests
from replicax.loop.training_run import TrainingRun
from replicax.loop.wall_time import WallTime, since_process_start
from replicax.strategy import Strategy
from replicax.workers import heartbeat

if TYPE_CHECKING:
    from replicax.checkpoint import CheckpointManager


RATED = 4
"""Over how many logging intervals the examples per second are measured: one alone may have waited for another's."""
NOTICEABLE = 1e-3
"""For how many seconds one has to wait for values to say that they were not there yet."""


def train(
    step: Callable[[Any], Any],
    dataset: Any,
    steps: int,
    *,
    checkpoints: CheckpointManager | None = None,
    evaluate: Callable[[], Any] | tuple[Callable[[Any], Any], Any] | None = None,
    evaluate_every: int | None = None,
    log_every: int = 100,
    logs: str | os.PathLike[str] | None = None,
    metrics: Sequence[Any] | Mapping[str, Any] = (),
    reduce: ReduceOp | str | Mapping[str, ReduceOp | str] = "sum",
    callbacks: Sequence[Callback] = (),
    stop_at_nan: bool = False,
    stop_file: str | os.PathLike[str] | None = None,
    profile: tuple[int, int] | None = None,
    steps_per_call: int | None = None,
    progress: bool = True,
    strategy: Strategy | None = None,
) -> TrainingRun:
    """Run ``step`` for ``steps`` elements of ``dataset``: the training loop.

    With ``checkpoints`` the run goes on where an earlier one of the same folder has come to: variables, optimizer,
    metrics, callbacks, and the next example of the input. It ends with a checkpoint: after the last step, after Ctrl-C
    (a second one ends at once), after SIGTERM, a stop file, or ``run.stop()``.

    Args:
      step: the step of ``strategy.run(step, args=(batch,))``, written for one replica. It returns what is to be
        logged: a number, which is called ``"loss"``, a dict of numbers, or ``None``. A number in which replicas differ
        (T) is this replica's *share*, as :func:`compute_average_loss` makes it: the shares are added up. See
        ``reduce``.
      dataset: a distributed dataset; an iterator of one, which goes on from where it is; or what
        ``strategy.distribute_dataset`` takes. Passes over it follow each other until there were ``steps`` steps. (For
        another order in each pass, let the dataset repeat and shuffle itself.)
      steps: how many there are to be in all, those before a resume included.
      checkpoints: a manager; the objects of its checkpoint are restored first, and saved when the manager says, and at
        the end. The loop adds its own under the name ``train``: the place in the input, metrics, callbacks.
      evaluate: a function without arguments, which returns numbers (``strategy.reduce`` combines those of replicas); or
        ``(step, dataset)``, a step that returns numbers like those of ``step``: then each is averaged over all examples
        of one pass.
      evaluate_every: after how many steps, besides the last one; ``None``: only after that.
      log_every: after how many steps the numbers of the step are logged, besides the last one.
      logs: a folder for ``train.csv``, ``evaluation.csv``, TensorBoard event files (if tensorboardX is installed),
        profiles, and the times of attempts.
      metrics: a list or dict of :class:`Mean` and the like, which ``step`` updates: the result of each interval is
        logged, and then the metric is reset.
      reduce: how numbers in which replicas differ are combined: ``"sum"``, ``"mean"``, or a dict by name.
      callbacks: :class:`Callback` objects, such as :class:`EarlyStopping`.
      stop_at_nan: raise an error that names the step, when a number of one was NaN or infinite: at the latest one
        logging interval later, and before anything is saved.
      stop_file: the run ends when there is such a file.
      profile: two steps: ``jax.profiler`` records what happens after the first, until the second, in ``logs``.
      steps_per_call: how many steps go to the devices at once; ``None`` to have it chosen by what is measured. It
        changes the time, and no number.
      progress: whether the chief shows a bar (a line now and then where there is no terminal), and at the end where the
        time went.
      strategy: whose replicas run the step. By default it is the dataset's, or else the current one.

    Returns:
      The :class:`TrainingRun`: the last step, the last numbers, why it stopped.

    Raises:
      TypeError, ValueError: an argument that can't be; a step that returns something else; a dataset without elements,
        or one whose place can't be saved, with ``checkpoints``.
      FloatingPointError: ``stop_at_nan``; names the step.
      KeyboardInterrupt: after Ctrl-C, when all is saved.
      SystemExit: after SIGTERM, when all is saved, with the code :data:`EXIT_PREEMPTED`.
      Exception: as ``strategy.run``, ``CheckpointManager``, the dataset and callbacks raise. The checkpoints saved
        before are there.

    Values are logged one interval late, so nobody waits for the devices: see ``docs/loop.md``, which also has this
    loop written by hand. No collective besides the step's, but at logging intervals, one or two.

    >>> import replicax, numpy as np
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     w = replicax.Variable(0.0, name="w", aggregation="sum")
    >>> def step(x):
    ...     w.assign_add(x.sum())
    ...     return replicax.compute_average_loss(x)
    >>> dataset = strategy.distribute_dataset([np.arange(4.0), np.arange(4.0, 8.0)])
    >>> run = replicax.train(step, dataset, steps=4, progress=False)
    >>> run.step, run.numbers["loss"], float(w)
    (4, 5.5, 56.0)
    """
    wall = WallTime(began=time.perf_counter() - since_process_start())
    steps = _count(steps, "steps", least=0)
    _count(log_every, "log_every")
    if evaluate_every is not None:
        _count(evaluate_every, "evaluate_every")
        if evaluate is None:
            raise ValueError("replicax.train(evaluate_every=…) needs to know how: pass evaluate, too")
    if profile is not None and logs is None:
        raise ValueError("replicax.train(profile=…) needs a folder to write to: pass logs, too")
    strategy = _strategy_of(dataset, strategy)
    check_call(strategy.extended.replicas, step, (), method="replicax.train")
    loop = _Loop(
        strategy=strategy,
        fn=step,
        dataset=dataset,
        steps=steps,
        wall=wall,
        checkpoints=checkpoints,
        folder=None if logs is None else pathlib.Path(logs),
        log_every=log_every,
        evaluate=evaluate,
        evaluate_every=evaluate_every,
        metrics=_named(metrics),
        combination=Combination(reduce),
        callbacks=_checked_callbacks(callbacks),
        stop_at_nan=stop_at_nan,
        stop_file=None if stop_file is None else pathlib.Path(stop_file),
        profile=_checked_profile(profile),
        steps_per_call=steps_per_call,
        progress=progress,
    )
    return loop.run()


class _Loop:
    """One call of :func:`train`."""

    def __init__(
        self,
        *,
        strategy: Strategy,
        fn: Callable[[Any], Any],
        dataset: Any,
        steps: int,
        wall: WallTime,
        checkpoints: CheckpointManager | None,
        folder: pathlib.Path | None,
        log_every: int,
        evaluate: Any,
        evaluate_every: int | None,
        metrics: Mapping[str, Any],
        combination: Combination,
        callbacks: Sequence[Callback],
        stop_at_nan: bool,
        stop_file: pathlib.Path | None,
        profile: tuple[int, int] | None,
        steps_per_call: int | None,
        progress: bool,
    ) -> None:
        replicas = strategy.extended.replicas
        self._strategy, self._wall, self._folder = strategy, wall, folder
        self._metrics, self._combination, self._profile = metrics, combination, profile
        self._log_every, self._evaluate_every = log_every, evaluate_every
        self._requests = StopRequests(replicas.lockstep, stop_file)
        self._evaluation = None
        if evaluate is not None:
            self._evaluation = Evaluation(evaluate, strategy, combination, self._requests.next_call)
        if not isinstance(dataset, DistributedDataset | DistributedIterator):
            dataset = strategy.distribute_dataset(dataset)
        self._input = EndlessInput(dataset, replicas, wall, checkpoints is not None)
        self._saves = SavedRuns(checkpoints, self._input, metrics, callbacks)
        self._run = TrainingRun(strategy, steps, wall, self._requests.request)
        self._show = Progress() if progress and self._run.is_chief else None
        self._callbacks = callbacks
        self._files: list[Callback] = [] if self._show is None else [self._show]
        if folder is not None:
            self._files += [CSVLog(folder), *([TensorBoardLog(folder)] if can_write_events() else ())]
        periods = (log_every, evaluate_every, self._saves.every_steps, *(profile or ()))
        self._periods = [period for period in periods[:3] if period is not None]
        self._calls = StepsPerCall(
            steps_per_call, [period for period in periods if period], replicas.lockstep, time.perf_counter
        )
        with strategy.scope():
            self._finite = FiniteWatch() if stop_at_nan else None
        self._step = NumberedStep(fn, self._finite)
        self._lengths: set[int] = set()
        self._outputs: dict[str, Any] = {}
        self._pending: Pending | None = None
        self._rates = collections.deque([(0, 0.0)], maxlen=RATED + 1)  # examples, and seconds of training
        self._evaluated: dict[str, float] | None = None  # what an evaluation of the present step gave
        self._logged_step = -1
        self._profiling = False
        self._started: list[Callback] = []

    # --- the course of a run --------------------------------------------------------------------------------

    def run(self) -> TrainingRun:
        """All of it."""
        run, wall = self._run, self._wall
        why = None
        with self._requests, contextlib.closing(self._input):
            try:
                with wall.on("restoring"):
                    run.resumed_at = self._saves.restore()
                run.step = run.resumed_at or 0
                self._begin()
                why = self._steps()
                why = self._finish(why)
            finally:
                self._end()
        if why in SIGNALS:
            where = f"saved in {self._saves.directory}" if self._saves.is_on else "not saved: there are no checkpoints"
            self._say(f"{why}: the run has stopped after step {run.step:,}, which is {where}")
        self._say(run.time_table())
        if why == PREEMPTED:
            sys.exit(EXIT_PREEMPTED)
        if why == INTERRUPTED:
            raise KeyboardInterrupt(f"the run was interrupted after step {run.step}")
        return run

    def _begin(self) -> None:
        run, wall = self._run, self._wall
        folder = self._folder
        if folder is None and self._saves.directory is not None:
            folder = pathlib.Path(self._saves.directory)
        with wall.on("logging"):
            self._attempts = Attempts(folder if run.is_chief else None, run.step, goes_on=self._saves.is_on)
            self._attempts.note(run.step, wall.seconds)
            run.attempts = len(self._attempts.before) + 1
            run._all = lambda: self._attempts.total(wall.seconds)
            if run.step >= run.steps:
                done = f"the checkpoint is of step {run.step:,}, and " if run.resumed_at is not None else ""
                self._say(f"nothing to do: {done}there are to be {run.steps:,} steps")
            elif run.resumed_at is not None:
                self._say(f"goes on after step {run.step:,} of {run.steps:,}, saved in {self._saves.directory}")
        self._call_back(lambda callback: callback.on_start(run), starting=True)
        if self._finite is not None:
            self._finite.start(run.step)
        self._rates[-1] = 0, wall.training

    def _steps(self) -> str | None:
        """The steps; why they ended before the last one."""
        run = self._run
        if run.resumed_at and run.step < run.steps and self._is_to_evaluate():
            why = self._evaluate()  # to which the attempt before has not come
            if why is not None:
                return why
        while run.step < run.steps:
            why = self._requests.next_call()
            if why is not None:
                return why
            self._call(self._calls.next(self._boundary() - run.step))
            why = self._between()
            if why is not None:
                return why
        return None

    def _finish(self, why: str | None) -> str | None:
        """After the last step: log, evaluate and save; why there are not more steps."""
        run = self._run
        if why is not None:
            why = self._requests.agree() or why
        has_run = run.step > (run.resumed_at or 0)
        if has_run and self._logged_step != run.step:
            self._log()
        self._log_pending()
        is_last = run.step > 0 and why not in SIGNALS and (has_run or run.step == run.steps)
        if is_last and self._evaluation is not None and self._saves.evaluated != run.step:
            why = self._evaluate() or why
        if has_run:
            self._save()
        with self._wall.on("saving"):
            self._saves.wait()
        late = self._requests.agree()
        run.stopped = why = late if late in SIGNALS else why  # one that came while the last step was saved
        return why

    def _end(self) -> None:
        """Whether it went well or not."""
        run, wall = self._run, self._wall
        try:
            self._stop_profile()
        finally:
            with wall.on("callbacks"):
                for callback in reversed(self._started):
                    callback.on_end(run)
            wall.stop()
            if self._started:
                self._attempts.note(run.step, wall.seconds)

    # --- one call, and what comes after it ------------------------------------------------------------------

    def _boundary(self) -> int:
        """The next step after which something happens."""
        step = self._run.step
        found = min([self._run.steps, *((step // period + 1) * period for period in self._periods)])
        return min([found, *(at for at in self._profile or () if at > step)])

    def _call(self, count: int) -> None:
        """The next steps: so many, or fewer at the end of a pass."""
        run, wall = self._run, self._wall
        if self._profile is not None and self._profile[0] <= run.step < self._profile[1]:
            self._start_profile()
        traces = self._step.traces
        wall.switch("steps")
        ctx = self._launched(count)
        if ctx.steps not in self._lengths or (self._step.traces > traces and not self._calls.is_exact):
            self._lengths.add(ctx.steps)
            with self._fetching():
                jax.block_until_ready(ctx.last_step_outputs[DONE])
            wall.count_as("compile")
        if not self._outputs:
            self._combination.check(ctx.last_step_outputs)
        self._outputs = ctx.last_step_outputs
        run.step += ctx.steps
        heartbeat.made(run.step)
        run.examples = self._input.examples
        self._evaluated = None
        with self._fetching():
            self._calls.ran(self._outputs[DONE], self._input.bytes_per_step, run.steps - run.step)

    def _fetching(self) -> AbstractContextManager[None]:
        """Around all that waits for what steps compute: only there it shows that another worker's end broke one off."""
        return self._strategy.extended.replicas.lockstep.explaining(f"the step {self._step.__name__!r}")

    @_jax.outside_meshes
    def _launched(self, count: int) -> MultiStepContext:
        return run_steps(self._strategy.extended.programs, self._step, self._input, count, None)

    def _between(self) -> str | None:
        """Whatever is due after this step; why the run is to end, if it is."""
        run = self._run
        if self._profiling and self._profile is not None and run.step >= self._profile[1]:
            self._stop_profile()
        if run.step % self._log_every == 0:
            self._log()
        if self._show is not None:
            self._show.advanced(run.step)
        if run.step == run.steps:
            return None  # the rest belongs to the end
        if self._is_to_evaluate():
            why = self._evaluate()
            if why is not None:
                return why
        if self._saves.is_due(run.step):
            self._save()
        return None

    def _log(self) -> None:
        """Start to fetch the numbers of this step, and log those that were due one interval ago."""
        with self._wall.on("logging"):
            numbers = self._combination.combined(self._outputs, self._strategy)
            for name, metric in self._metrics.items():
                numbers[name] = metric.result()
                metric.reset()
            pending = Pending(self._run.step, numbers, self._run.examples, self._wall.training)
        self._logged_step = self._run.step
        self._log_pending()
        self._pending = pending

    def _log_pending(self) -> None:
        run, wall = self._run, self._wall
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        asked = wall.training
        with wall.on("steps"), self._fetching():
            values = pending.values()
        # Who had to wait knows when the step was done. Otherwise the devices keep up with the launches.
        came = wall.training
        done = came if came - asked > NOTICEABLE else max(pending.launched, self._rates[-1][1])
        if self._finite is not None:
            self._finite.check(pending.numbers)
        self._rates.append((pending.examples, done))
        (examples, since), (until_now, now) = self._rates[0], self._rates[-1]
        run.examples_per_second = (until_now - examples) / max(now - since, 1e-9)
        values["examples_per_second"] = run.examples_per_second
        run.numbers = values
        self._call_back(lambda callback: callback.on_log(run, pending.step, values))
        with wall.on("logging"):
            self._attempts.note(run.step, wall.seconds)

    def _is_to_evaluate(self) -> bool:
        every, step = self._evaluate_every, self._run.step
        return every is not None and step % every == 0 and self._saves.evaluated != step

    def _evaluate(self) -> str | None:
        """Evaluate the model as it is; why the run is to end, if it is."""
        run, wall = self._run, self._wall
        assert self._evaluation is not None
        self._log_pending()
        self._wait()
        with wall.on("evaluation"):
            try:
                values = self._evaluation()
            except InterruptedEvaluation as interrupted:
                return self._requests.agree() or str(interrupted)
        run.evaluation = self._evaluated = values
        self._saves.evaluated = run.step
        self._call_back(lambda callback: callback.on_evaluation(run, run.step, values))
        return self._requests.agree()

    def _save(self) -> None:
        run, wall = self._run, self._wall
        if not self._saves.is_on:
            return
        self._log_pending()  # which one who goes on from here can't make up for
        self._wait()
        if self._finite is not None and self._outputs:
            self._finite.check(self._outputs)
        with wall.on("saving"):
            saved = self._saves.save(run.step, self._evaluated)
        if saved:
            self._call_back(lambda callback: callback.on_save(run, run.step))
            with wall.on("logging"):
                self._attempts.note(run.step, wall.seconds)

    def _wait(self) -> None:
        """Wait for the devices, so that what follows is not charged for the steps before it."""
        with self._wall.on("steps"), self._fetching():
            if self._outputs:
                jax.block_until_ready(self._outputs[DONE])

    def _start_profile(self) -> None:
        if not self._profiling:
            assert self._folder is not None
            self._wait()
            with self._wall.on("logging"):
                jax.profiler.start_trace(str(self._folder / "profile"))
            self._profiling = True

    def _stop_profile(self) -> None:
        if self._profiling:
            self._wait()
            with self._wall.on("logging"):
                jax.profiler.stop_trace()
            self._profiling = False

    # --- telling --------------------------------------------------------------------------------------------

    def _call_back(self, call: Callable[[Callback], None], starting: bool = False) -> None:
        for kind, callbacks in (("logging", self._files), ("callbacks", self._callbacks)):
            with self._wall.on(kind):
                for callback in callbacks:
                    if starting:
                        self._started.append(callback)
                    call(callback)

    def _say(self, line: str) -> None:
        if self._show is not None:
            self._show.say(line)
        elif self._run.is_chief:
            logging.getLogger("replicax").info("%s", line)


# --- arguments ------------------------------------------------------------------------------------------


def _strategy_of(dataset: Any, given: Any) -> Strategy:
    """Whose replicas run the step.

    Raises:
      TypeError: ``given`` is no strategy.
      ValueError: the dataset was distributed by another one.
    """
    if given is not None and not isinstance(given, Strategy):
        raise TypeError(f"replicax.train(strategy=…) must be a strategy or None, got {given!r}")
    if not isinstance(dataset, DistributedDataset | DistributedIterator):
        return context.get_strategy() if given is None else given
    owner = dataset._pipeline.workers.owner
    assert owner is not None
    if given is not None and given is not owner.strategy:
        raise ValueError(
            f"replicax.train(strategy={given!r}): the dataset was distributed by {owner.strategy!r}, whose replicas "
            "have its elements: leave strategy out, or distribute the dataset with this one"
        )
    return owner.strategy


def _count(value: Any, name: str, least: int = 1) -> int:
    """``value`` as an int.

    Raises:
      ValueError: it is not an int of at least ``least``.
    """
    try:
        count = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = least - 1
    if count < least:
        raise ValueError(f"replicax.train: {name} must be an int of at least {least}, got {value!r}")
    return count


def _named(metrics: Any) -> dict[str, Any]:
    """Metrics by name.

    Raises:
      TypeError: one is not a metric.
      ValueError: two have one name.
    """
    pairs = list(metrics.items()) if isinstance(metrics, Mapping) else [(getattr(m, "name", ""), m) for m in metrics]
    for name, metric in pairs:
        if not callable(getattr(metric, "result", None)) or not callable(getattr(metric, "reset", None)) or not name:
            raise TypeError(
                "replicax.train(metrics=…) takes objects with a name and the methods result() and reset(), such as "
                f"replicax.Mean, or a dict of those by name, got {metric!r}"
            )
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(
            f"replicax.train(metrics=…): two metrics have one name: {names}. Pass a dict, with other names."
        )
    return dict(pairs)


def _checked_callbacks(callbacks: Any) -> list[Callback]:
    callbacks = list(callbacks)
    for callback in callbacks:
        if not isinstance(callback, Callback):
            hint = ": pass an object, not the class" if isinstance(callback, type) else ""
            raise TypeError(f"replicax.train(callbacks=…) takes replicax.Callback objects, got {callback!r}{hint}")
    return callbacks


def _checked_profile(profile: Any) -> tuple[int, int] | None:
    if profile is None:
        return None
    if isinstance(profile, tuple | list) and len(profile) == 2:
        first, last = (_count(step, "profile", least=0) for step in profile)
        if first < last:
            return first, last
    raise ValueError(
        f"replicax.train(profile=…) takes two steps, the second one larger, as in profile=(10, 20), got {profile!r}"
    )
