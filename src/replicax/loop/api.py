"""``train``: a step, run over a dataset for as long as a run lasts."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from replicax import _jax, context
from replicax.argument_checks import checked_integer, checked_path
from replicax.collectives import ReduceOp
from replicax.data import DistributedDataset, DistributedIterator
from replicax.execution.run import check_call
from replicax.loop.callbacks import Callback, EarlyStopping, restoring_callback
from replicax.loop.logs.speed import Speed
from replicax.loop.step_metrics import Combination
from replicax.loop.step_objects import objects_of
from replicax.loop.training_loop import TrainingLoop
from replicax.loop.training_run import TrainingRun
from replicax.loop.wall_time import WallTime, since_process_start
from replicax.loop.wrapped_steps.accumulation import AccumulatedStep
from replicax.loop.wrapped_steps.precision import DTYPES, Precision
from replicax.planning.report import Plan
from replicax.strategy import Strategy
from replicax.user_functions import function_name

if TYPE_CHECKING:
    from replicax.checkpoint import CheckpointManager

SAVED_EVERY = 600.0
"""Seconds between two checkpoints, where only their folder is given."""


@_jax.hiding_frames
def train(
    step: Callable[[Any], Any],
    dataset: Any,
    steps: int,
    *,
    checkpoints: CheckpointManager | str | os.PathLike[str] | None = None,
    evaluate: Callable[[], Any] | tuple[Callable[[Any], Any], Any] | None = None,
    evaluate_every: int | None = None,
    log_every: int = 100,
    logs: str | os.PathLike[str] | None = None,
    metrics: Sequence[Any] | Mapping[str, Any] = (),
    reduce: ReduceOp | str | Mapping[str, ReduceOp | str] = "sum",
    callbacks: Callback | Sequence[Callback] = (),
    stop_at_nan: bool = False,
    stop_file: str | os.PathLike[str] | None = None,
    profile: tuple[int, int] | None = None,
    steps_per_call: int | None = None,
    precision: Literal["bf16", "fp16"] | Precision | None = None,
    accumulate: int = 1,
    tokens_per_example: int | None = None,
    plan: Plan | None = None,
    progress: bool | float = True,
    strategy: Strategy | None = None,
) -> TrainingRun:
    """Run ``step`` for ``steps`` elements of ``dataset``: the training loop.

    With ``checkpoints`` the run goes on where an earlier one in the same folder has ended: with its variables,
    optimizer, metrics and callbacks, and with the next example of the input. It ends with a checkpoint: after the last
    step, after Ctrl-C (a second one ends at once), after SIGTERM, a stop file, or ``run.stop()``.

    Args:
      step: the step of ``strategy.run(step, args=(batch,))``, written for one replica. It returns what is to be
        logged: a number, which is called ``"loss"``, a dict of numbers, or ``None``. A number in which replicas differ
        is this replica's *share*, as :func:`compute_average_loss` makes it: the shares are added up. See
        ``reduce``.
      dataset: a distributed dataset; an iterator of one, which goes on from where it is; or what
        ``strategy.distribute_dataset`` takes. After its last element a new pass begins, until ``steps`` steps have
        been run. (For another order in each pass, let the dataset repeat and shuffle itself.)
      steps: how many steps there are to be in all, those before a resume included.
      checkpoints: a folder: all variables, optimizers, metrics and models that the step uses are restored first, and
        saved every ten minutes and at the end. Or a manager, which says what is saved, and when. The loop adds its own
        under the name ``train``: the place in the input, metrics, callbacks.
      evaluate: a function without arguments, which returns numbers (``strategy.reduce`` combines those of replicas); or
        ``(step, dataset)``, a step that returns numbers like those of ``step``: then each is averaged over all examples
        of one pass.
      evaluate_every: evaluate after every so many steps, and after the last one; ``None``: only after the last one.
      log_every: log the numbers of the step after every so many steps, and after the last one.
      logs: a folder for ``train.csv``, ``evaluation.csv``, TensorBoard event files (if tensorboardX is installed),
        profiles, and the times of attempts.
      metrics: a list or dict of :class:`Mean` and the like, which ``step`` updates: the result of each interval is
        logged, and then the metric is reset.
      reduce: how numbers in which replicas differ are combined, those of ``evaluate=(step, dataset)`` too: ``"sum"``,
        ``"mean"``, or a dict by name.
      callbacks: a :class:`Callback`, such as :class:`EarlyStopping`, or a list of them.
      stop_at_nan: raise an error when a number of a step was NaN or infinite, and name the step: at the latest one
        logging interval later, and before anything is saved.
      stop_file: the run ends when this file exists.
      profile: two steps: ``jax.profiler`` records what happens after the first, until the second, in ``logs``.
      steps_per_call: how many steps go to the devices at once; ``None`` chooses it by measurement. It changes the time,
        and no number.
      precision: ``"bf16"`` or ``"fp16"``: the step computes in bfloat16, or in float16 with a dynamic loss scale, and
        parameters stay float32; or a :class:`replicax.loop.Precision`.
      accumulate: into how many micro-batches each replica splits its batch. Their gradients are added up, and applied
        once: the same update with the memory of a micro-batch. See :func:`replicax.loop.accumulated`.
      tokens_per_example: the length of a sequence: then ``tokens_per_second`` is logged, too.
      plan: what :func:`replicax.plan` found for this step and these devices: then ``of_plan`` is logged, too, the speed
        as a share of the predicted one.
      progress: whether the chief shows a bar, and at the end where the time went. In a notebook the bar is a line of
        text; where there is no terminal, a line is printed every ten seconds. A number: after so many seconds instead.
      strategy: the one whose replicas run the step. By default it is the dataset's, or else the current one.

    Returns:
      The :class:`TrainingRun`: the last step, the last numbers, why it stopped.

    Raises:
      TypeError, ValueError: an invalid argument; a step that returns something else; a dataset without elements, or one
        whose place can't be saved, with ``checkpoints``.
      FloatingPointError: ``stop_at_nan``; names the step.
      KeyboardInterrupt: after Ctrl-C, when all is saved.
      SystemExit: after SIGTERM, when all is saved, with the code :data:`EXIT_PREEMPTED`.
      Exception: as ``strategy.run``, ``CheckpointManager``, the dataset and callbacks raise. Earlier checkpoints stay.

    Values are logged one interval late, so no step waits for them: see ``docs/loop.md``, which also has this
    loop written by hand. Issues the collectives of the step, and one or two in each logging interval.

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
    steps = checked_integer(steps, "replicax.train: steps", 0)
    checked_integer(log_every, "replicax.train: log_every")
    folder = None if logs is None else pathlib.Path(checked_path(logs, "replicax.train: logs"))
    file = None if stop_file is None else pathlib.Path(checked_path(stop_file, "replicax.train: stop_file"))
    if file is not None and file.is_dir():
        raise ValueError(f"replicax.train: stop_file must be the path of a file, got the folder {stop_file!r}")
    if evaluate_every is not None:
        checked_integer(evaluate_every, "replicax.train: evaluate_every")
        if evaluate is None:
            raise ValueError("replicax.train(evaluate_every=…) needs to know how: pass evaluate, too")
    if profile is not None and logs is None:
        raise ValueError("replicax.train(profile=…) needs a folder to write to: pass logs, too")
    if tokens_per_example is not None:
        checked_integer(tokens_per_example, "replicax.train: tokens_per_example")
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"replicax.train(plan=…) takes what replicax.plan(strategy, step, spec) returns, got {plan!r}")
    if not isinstance(progress, bool | int | float) or progress < 0:
        raise ValueError(f"replicax.train(progress=…) takes a bool, or seconds between two lines, got {progress!r}")
    callbacks = _checked_callbacks(callbacks, evaluate)
    strategy = _strategy_of(dataset, strategy)
    check_call(strategy.extended.replicas, step, (), method="replicax.train")
    combination = Combination(reduce)
    parts = checked_integer(accumulate, "replicax.train: accumulate")
    loop = TrainingLoop(
        strategy=strategy,
        fn=step if parts == 1 else AccumulatedStep(step, parts, combination.means, others=True),
        dataset=dataset,
        steps=steps,
        wall=wall,
        checkpoints=_manager_of(checkpoints, step, restoring_callback(callbacks)),
        has_found_objects=isinstance(checkpoints, str | os.PathLike),
        folder=folder,
        log_every=log_every,
        evaluate=evaluate,
        evaluate_every=evaluate_every,
        metrics=_metrics_by_name(metrics),
        combination=combination,
        callbacks=callbacks,
        stop_at_nan=stop_at_nan,
        stop_file=file,
        profile=_checked_profile(profile),
        steps_per_call=steps_per_call,
        precision=_precision_of(precision, strategy),
        speed=Speed(strategy, tokens_per_example, plan),
        progress=progress,
    )
    return loop.run()


# --- arguments ------------------------------------------------------------------------------------------


def _strategy_of(dataset: Any, given: Any) -> Strategy:
    """Return the strategy whose replicas run the step."""
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


def _manager_of(checkpoints: Any, step: Callable[..., Any], best: EarlyStopping | None) -> CheckpointManager | None:
    """The manager itself; or one for the objects of the step, if only the folder is given."""
    from replicax.checkpoint import Checkpoint, CheckpointManager

    if checkpoints is not None and not isinstance(checkpoints, CheckpointManager | str | os.PathLike):
        raise TypeError(
            "replicax.train(checkpoints=…) takes a folder, or a replicax.CheckpointManager, which knows what to save "
            f"and when: replicax.CheckpointManager(checkpoint, 'FOLDER', every_steps=…), got {checkpoints!r}"
        )
    wanted = None if best is None else (best.metric, best.mode)
    if not isinstance(checkpoints, str | os.PathLike):
        if best is not None and (checkpoints is None or checkpoints.best != wanted):
            raise ValueError(
                f"replicax.train: {best!r} restores the best checkpoint at the end, so there must be one: pass a "
                f"folder as checkpoints, or a replicax.CheckpointManager(…, best={wanted!r})"
            )
        return checkpoints
    objects = objects_of(step)
    if not objects:
        raise ValueError(
            f"replicax.train(checkpoints={os.fspath(checkpoints)!r}): the step {function_name(step)!r} uses no "
            "variable, optimizer or model by a name, so it is not known what to save. Say it: checkpoints="
            f"replicax.CheckpointManager(replicax.Checkpoint(model=…, optimizer=…), {os.fspath(checkpoints)!r})"
        )
    return CheckpointManager(Checkpoint(**objects), checkpoints, every_seconds=SAVED_EVERY, best=wanted)


def _precision_of(precision: Any, strategy: Strategy) -> Precision | None:
    if isinstance(precision, str) and precision in DTYPES:
        with strategy.scope():
            return Precision(precision)
    if precision is None or isinstance(precision, Precision):
        return precision
    raise ValueError(
        "replicax.train(precision=…) takes 'bf16', 'fp16' or a replicax.loop.Precision; None computes in the dtypes "
        f"that the step has, got {precision!r}"
    )


def _metrics_by_name(metrics: Any) -> dict[str, Any]:
    """Metrics by name."""
    if not isinstance(metrics, Iterable):
        raise TypeError(
            f"replicax.train(metrics=…) takes a list or dict of metrics, got {metrics!r}; for one: [metric]"
        )
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


def _checked_callbacks(callbacks: Any, evaluate: Any) -> list[Callback]:
    callbacks = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            hint = ": pass an object, not the class" if isinstance(callback, type) else ""
            raise TypeError(f"replicax.train(callbacks=…) takes replicax.Callback objects, got {callback!r}{hint}")
        # A subclass may read the numbers of steps.
        if evaluate is None and isinstance(callback, EarlyStopping) and type(callback).on_log is Callback.on_log:
            raise ValueError(
                f"replicax.train: {callback!r} watches a number of evaluations, and this run makes none: pass "
                "evaluate and evaluate_every, too"
            )
    return callbacks


def _checked_profile(profile: Any) -> tuple[int, int] | None:
    if profile is None:
        return None
    if isinstance(profile, tuple | list) and len(profile) == 2:
        first, last = (checked_integer(step, "replicax.train: profile", 0) for step in profile)
        if first < last:
            return first, last
    raise ValueError(
        f"replicax.train(profile=…) takes two steps, the second one larger, as in profile=(10, 20), got {profile!r}"
    )
