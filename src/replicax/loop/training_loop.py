"""The training loop: the course of one run, from its restore to its end, and what is due after each step."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax

from replicax import _jax
from replicax.data import DistributedDataset, DistributedIterator
from replicax.execution.many_steps.loop import run_steps
from replicax.execution.many_steps.step_outputs import MultiStepContext
from replicax.execution.run import prepare
from replicax.execution.tracing.stateful_arguments import stateful_call
from replicax.loop.attempt_times import Attempts
from replicax.loop.callbacks import Callback, restoring_callback
from replicax.loop.endless_input import EndlessInput
from replicax.loop.logs.metric_files import CSVLog, TensorBoardLog
from replicax.loop.logs.progress_bar import LINES, Progress
from replicax.loop.logs.speed import Speed, flops_of
from replicax.loop.periodic_evaluation import Evaluation
from replicax.loop.saved_runs import SavedRuns
from replicax.loop.step_metrics import DONE, Combination, FiniteWatch, NumberedStep, Pending, check_names, results_of
from replicax.loop.steps_per_call import StepsPerCall
from replicax.loop.stop_requests import INTERRUPTED, PREEMPTED, SIGNALS, RunStops, StopRequests
from replicax.loop.training_run import TrainingRun
from replicax.loop.wall_time import WallTime
from replicax.loop.wrapped_steps.accumulation import AccumulatedStep
from replicax.loop.wrapped_steps.precision import Precision
from replicax.strategy import Strategy
from replicax.system.exit_codes import EXIT_PREEMPTED
from replicax.system.folders import make_folder
from replicax.system.packages import is_installed

if TYPE_CHECKING:
    from replicax.checkpoint import CheckpointManager


NOTICEABLE = 1e-3
"""A longer wait for values, in seconds, means that they were not computed yet."""


class TrainingLoop:
    """One call of :func:`replicax.train`, with its arguments, checked."""

    def __init__(
        self,
        *,
        strategy: Strategy,
        fn: Callable[[Any], Any],
        dataset: Any,
        steps: int,
        wall: WallTime,
        checkpoints: CheckpointManager | None,
        has_found_objects: bool,
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
        precision: Precision | None,
        speed: Speed,
        progress: bool | float,
    ) -> None:
        replicas = strategy.extended.replicas
        if folder is not None and replicas.lockstep.workers.index == 0:  # the chief, which writes there
            make_folder(str(folder))
        self._strategy, self._wall, self._folder = strategy, wall, folder
        self._metrics, self._combination, self._profile = metrics, combination, profile
        self._log_every, self._evaluate_every = log_every, evaluate_every
        self._requests = StopRequests(replicas.lockstep, stop_file)
        self._evaluation = None
        if evaluate is not None:
            self._evaluation = Evaluation(evaluate, strategy, combination, self._requests)
        if not isinstance(dataset, DistributedDataset | DistributedIterator):
            dataset = strategy.distribute_dataset(dataset)
        self._input = EndlessInput(dataset, replicas, wall, self._requests, checkpoints is not None)
        watched = strategy.extended.variables if has_found_objects else ()
        self._precision, self._speed = precision, speed
        self._run = TrainingRun(strategy, steps, wall, self._requests.request)
        self._saves = SavedRuns(checkpoints, self._run, self._input, metrics, callbacks, precision, watched)
        lines = LINES if isinstance(progress, bool) else float(progress)
        self._show = Progress(lines=lines) if progress and self._run.is_chief else None
        reserved = [*speed.names, *(["loss_scale"] if precision and precision.variables else ())]
        self._taken = dict.fromkeys(reserved, "replicax.train logs one of its own by that name")
        check_names(metrics, "replicax.train(metrics=…) got", self._taken)
        self._taken |= dict.fromkeys(metrics, "a metric of the run has that name")
        self._restores = restoring_callback(callbacks)
        self._callbacks = callbacks
        self._files: list[Callback] = [] if self._show is None else [self._show]
        if folder is not None:
            self._files.append(CSVLog(folder))
            if is_installed("tensorboardX"):
                self._files.append(TensorBoardLog(folder))
        periods = (log_every, evaluate_every, self._saves.every_steps, *(profile or ()))
        self._periods = [period for period in periods[:3] if period is not None]
        self._calls = StepsPerCall(
            steps_per_call, [period for period in periods if period], replicas.lockstep, time.perf_counter
        )
        self._finite = FiniteWatch.of(strategy) if stop_at_nan else None
        self._fn = fn
        self._step = NumberedStep(fn if precision is None else precision(fn), self._finite)
        self._lengths: set[int] = set()
        self._outputs: dict[str, Any] = {}
        self._pending: Pending | None = None
        self._evaluated: dict[str, float] | None = None  # what an evaluation of the present step gave
        self._logged_step = -1
        self._profiling = False
        self._started: list[Callback] = []

    # --- the course of a run --------------------------------------------------------------------------------

    def run(self) -> TrainingRun:
        """Run the training from start to end."""
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
        if why not in SIGNALS:
            why = self._requests.own_signal or why  # one that came after all workers had agreed on the end
        if why in SIGNALS:
            where = f"saved in {self._saves.directory}" if self._saves.is_on else "not saved: there are no checkpoints"
            self._say(f"{why}: the run has stopped after step {run.step:,}, which is {where}")
        if run.restored is not None:
            self._say(f"restored the best checkpoint, of step {run.restored:,}")
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
            attempts = Attempts(folder if run.is_chief else None, run.step, goes_on=self._saves.is_on)
            attempts.note(run.step, wall.seconds)
            self._attempts, run.attempts = attempts, len(attempts.before) + 1
            run._all = lambda: attempts.total(wall.seconds)  # a TrainingRun that is kept must not keep the model
            if run.step >= run.steps:
                done = f"the checkpoint is of step {run.step:,}, and " if run.resumed_at is not None else ""
                self._say(f"nothing to do: {done}there are to be {run.steps:,} steps")
            elif run.resumed_at is not None:
                self._say(f"goes on after step {run.step:,} of {run.steps:,}, saved in {self._saves.directory}")
        self._call_back(lambda callback: callback.on_start(run), starting=True)
        if self._finite is not None:
            self._finite.start(run.step)
        self._speed.start(run.step, wall.training)

    def _steps(self) -> str | None:
        """Run the steps; returns why they ended before the last one."""
        run = self._run
        why = self._requests.agree()  # a callback may end the run at its start
        if why is None and run.resumed_at and run.step < run.steps and self._is_to_evaluate():
            why = self._evaluate()  # to which the attempt before has not come
        try:
            while why is None and run.step < run.steps:
                self._call(self._calls.next(self._boundary() - run.step))
                why = self._between()
        except RunStops as stops:
            why = str(stops)
        return why

    def _finish(self, why: str | None) -> str | None:
        """Log, evaluate and save after the last step; returns why there are no more steps."""
        run = self._run
        if why is not None:
            why = self._requests.agree()
        has_run = run.step > (run.resumed_at or 0)
        if has_run and self._logged_step != run.step:
            self._log()
        self._log_pending()
        is_last = run.step > 0 and why not in SIGNALS and (has_run or run.step == run.steps)
        if is_last and self._evaluation is not None and self._saves.evaluated != run.step:
            self._requests.forget()
            why = self._evaluate() or why
        if has_run:
            self._save()
        with self._wall.on("saving"):
            self._saves.wait()
        late = self._requests.agree()
        run.stopped = why = late if late in SIGNALS else why  # one that came while the last step was saved
        if self._restores is not None and why not in SIGNALS:
            with self._wall.on("restoring"):
                run.restored = self._saves.restore_best()
        return why

    def _end(self) -> None:
        """Release what the run holds, after success and failure alike."""
        run, wall = self._run, self._wall
        with contextlib.ExitStack() as ending:  # the last comes first, and all of it comes, whatever raises
            if self._started:
                ending.callback(lambda: self._attempts.note(run.step, wall.seconds))
            ending.callback(wall.stop)
            ending.enter_context(wall.on("callbacks"))
            for callback in self._started:
                ending.callback(callback.on_end, run)
            if self._finite is not None:
                ending.callback(self._finite.end)
            self._stop_profile()

    # --- one call, and what comes after it ------------------------------------------------------------------

    def _boundary(self) -> int:
        """The next step after which something happens."""
        step = self._run.step
        found = min([self._run.steps, *((step // period + 1) * period for period in self._periods)])
        return min([found, *(at for at in self._profile or () if at > step)])

    def _call(self, count: int) -> None:
        """Run the next steps: so many, or fewer at the end of a pass."""
        run, wall = self._run, self._wall
        if self._profile is not None and self._profile[0] <= run.step < self._profile[1]:
            self._start_profile()
        traces = self._step.traces
        wall.switch("steps")
        if not self._outputs:
            self._saves.watch()
        ctx = self._launch_steps(count)
        if ctx.steps not in self._lengths or (self._step.traces > traces and not self._calls.is_per_replica):
            self._lengths.add(ctx.steps)
            with self._fetching():
                jax.block_until_ready(ctx.last_step_outputs[DONE])
            wall.count_as("compile")
        if not self._outputs:
            self._saves.check_all_saved()
            check_names(ctx.last_step_outputs, f"{self._step.__name__} returned", self._taken)
            self._combination.check(ctx.last_step_outputs)
            self._combination.check_scales(ctx.last_step_outputs)
            if isinstance(self._fn, AccumulatedStep):
                self._fn.check_padding()
            if self._speed.peak is not None:
                self._count_flops()
        self._outputs = ctx.last_step_outputs
        run.step += ctx.steps
        run.examples = self._input.examples
        self._evaluated = None
        with self._fetching():
            self._calls.ran(self._outputs[DONE], self._input.bytes_per_step, run.steps - run.step)

    def _count_flops(self) -> None:
        """Count what a step computes: its program is there."""
        programs = self._strategy.extended.programs
        call = stateful_call(programs.replicas, self._step, (), None)
        if self._input.arguments is not None and not self._calls.is_per_replica:
            fn = self._step if call is None else call.fn
            program = prepare(programs, fn, self._input.arguments).program
            self._speed.flops = flops_of(program.jaxpr) * program.replicas

    def _fetching(self) -> AbstractContextManager[None]:
        """Enclose every wait for a step's results: only such a wait reveals that another worker has ended."""
        return self._strategy.extended.replicas.lockstep.explaining(f"the step {self._step.__name__!r}")

    @_jax.public_call
    def _launch_steps(self, count: int) -> MultiStepContext:
        return run_steps(self._strategy.extended.programs, self._step, self._input.take, count, None)

    def _between(self) -> str | None:
        """Do what is due after this step; returns why the run is to end, if it is."""
        run = self._run
        if self._profiling and self._profile is not None and run.step >= self._profile[1]:
            self._stop_profile()
        is_logged = run.step % self._log_every == 0
        if is_logged:
            self._log()
        if self._show is not None:
            self._show.advanced(run.step, is_logged)
        if run.step == run.steps:
            return None  # the rest belongs to the end
        why = self._evaluate() if self._is_to_evaluate() else None
        if why is None and self._saves.is_due(run.step):
            self._save()
        return why

    def _log(self) -> None:
        """Start to fetch the numbers of this step, and log those that were due one interval ago."""
        with self._wall.on("logging"):
            numbers = self._combination.combined(self._outputs, self._strategy) | results_of(self._metrics)
            if self._precision is not None and self._precision.variables:
                numbers["loss_scale"] = self._precision.variables["scale"].read_value()
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
        # A call that had to wait knows when the step was done. Otherwise the devices keep up with the launches.
        came = wall.training
        done = came if came - asked > NOTICEABLE else max(pending.launched, self._speed.seconds)
        if self._finite is not None:
            self._finite.check(pending.numbers)
        values |= self._speed.after(pending.step, pending.examples, done)
        run.examples_per_second = values["examples_per_second"]
        run.numbers = values
        self._call_back(lambda callback: callback.on_log(run, pending.step, values))
        with wall.on("logging"):
            self._attempts.note(run.step, wall.seconds)

    def _is_to_evaluate(self) -> bool:
        every, step = self._evaluate_every, self._run.step
        return every is not None and step % every == 0 and self._saves.evaluated != step

    def _evaluate(self) -> str | None:
        """Evaluate the model as it is; returns why the run is to end, if it is."""
        run, wall = self._run, self._wall
        assert self._evaluation is not None
        self._log_pending()
        self._wait()
        with wall.on("evaluation"):
            try:
                values = self._evaluation()
            except RunStops:
                return self._requests.agree()
        run.evaluation = self._evaluated = values
        with wall.on("saving"):
            self._saves.note_evaluation(run.step, values)
        self._call_back(lambda callback: callback.on_evaluation(run, run.step, values))
        if self._restores is not None and self._restores.best_step == run.step:
            self._save()
        return self._requests.agree()

    def _save(self) -> None:
        run, wall = self._run, self._wall
        if not self._saves.is_on:
            return
        self._log_pending()  # a run that goes on from here would not log it
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
