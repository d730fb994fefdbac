"""Trackers: the numbers of a run in Weights & Biases and MLflow."""

from __future__ import annotations

import logging
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from replicax import _jax
from replicax.loop.callbacks import NumbersLog
from replicax.loop.training_run import TrainingRun
from replicax.system.packages import check_installed

AHEAD = 100
"""How many messages to MLflow may be on their way."""


class _Tracker(NumbersLog):
    """A log of whole runs, which says at the end of each whether it has failed."""

    _handled: BaseException | None = None

    def on_start(self, run: TrainingRun) -> None:
        self._handled = sys.exc_info()[1]  # the run may be a second try, in an except clause of the user's

    def _has_failed(self) -> bool:
        handled, self._handled = self._handled, None
        return sys.exc_info()[1] is not handled


@_jax.hiding_frames_of
class WandbLog(_Tracker):
    """Logs the numbers of a run with Weights & Biases, on the chief.

    Numbers of the training are called ``train/…``, those of evaluations ``evaluation/…``, over the number of steps. A
    run that goes on from a checkpoint goes on in the same W&B run.

    Args:
      project: the project of the run; ``None``: as W&B chooses.
      **options: of ``wandb.init``, such as ``name=``, ``config=``, ``tags=``, ``dir=``, or ``mode="offline"``, which
        writes files for ``wandb sync``.

    Attributes:
      run: the W&B run, while the training lasts, on the chief: for whatever else you log.

    Raises:
      ImportError: the package wandb is not installed.
      TypeError: an option that this class sets itself.

    >>> import contextlib, replicax
    >>> with contextlib.suppress(ImportError):
    ...     callbacks = replicax.loop.WandbLog("digits", mode="offline")
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        check_installed("replicax.loop.WandbLog", "wandb", "wandb")
        for name in ("id", "resume"):
            if name in options:
                raise TypeError(
                    f"WandbLog: {name!r} is set by the run, which goes on where its checkpoint says; leave it out"
                )
        self._options = {"project": project, **options}
        self.state_name = project or ""
        self._id: str | None = None
        self.run: Any = None

    def on_start(self, run: TrainingRun) -> None:
        super().on_start(run)
        if run.resumed_at is None or self._id is None:
            self._id = _chiefs_value(run, secrets.token_hex(4))
        if run.is_chief:
            import wandb

            self.run = wandb.init(**self._options, id=self._id, resume="allow")
            self.run.define_metric("step", hidden=True)
            for group in ("train", "evaluation"):
                self.run.define_metric(f"{group}/*", step_metric="step")

    def on_end(self, run: TrainingRun) -> None:
        has_failed = self._has_failed()
        if self.run is not None:
            self.run.finish(exit_code=int(has_failed))
            self.run = None

    def get_state(self) -> Any:
        return {"id": self._id}

    def set_state(self, state: Any) -> None:
        self._id = state["id"]

    def _write(self, group: str, step: int, values: Mapping[str, float]) -> None:
        if self.run is not None:
            self.run.log({"step": step, **{f"{group}/{name}": value for name, value in values.items()}})


@_jax.hiding_frames_of
class MLflowLog(_Tracker):
    """Logs the numbers of a run with MLflow, on the chief.

    Numbers of the training are called ``train/…``, those of evaluations ``evaluation/…``. A run that goes on from a
    checkpoint goes on in the same MLflow run. A thread of MLflow's sends them; if that fails, a warning is logged.

    Args:
      experiment: its name; it is made if it is not there. ``None``: the default one.
      tracking_uri: a server, or a folder; ``None``: as ``MLFLOW_TRACKING_URI`` says.
      name: the name of the run; ``None``: as MLflow chooses.
      params: what is to be seen beside the numbers, such as the learning rate.

    Attributes:
      run_id: MLflow's id of the run, on all workers; ``None`` before it begins.

    Raises:
      ImportError: neither mlflow nor mlflow-skinny is installed.

    >>> import contextlib, replicax
    >>> with contextlib.suppress(ImportError):
    ...     callbacks = replicax.loop.MLflowLog("digits", params={"learning_rate": 0.1})
    """

    def __init__(
        self,
        experiment: str | None = None,
        *,
        tracking_uri: str | None = None,
        name: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        check_installed("replicax.loop.MLflowLog", "mlflow", "mlflow")
        self._experiment, self._uri, self._name = experiment, tracking_uri, name
        self._params = dict(params or {})
        self.state_name = experiment or ""
        self._client: Any = None
        self._sent: list[Any] = []
        self.run_id: str | None = None

    def on_start(self, run: TrainingRun) -> None:
        super().on_start(run)
        if run.resumed_at is None:
            self.run_id = None
        if run.is_chief:
            import mlflow

            self._client = mlflow.MlflowClient(self._uri)
            if self.run_id is None:
                self.run_id = self._begun()
            else:
                self._client.update_run(self.run_id, status="RUNNING")
        self.run_id = _chiefs_value(run, self.run_id)

    def on_end(self, run: TrainingRun) -> None:
        status = "FAILED" if self._has_failed() else "FINISHED"
        if self._client is not None:
            client, self._client = self._client, None
            for sent in self._sent:
                _try(sent.wait)
            self._sent.clear()
            _try(lambda: client.set_terminated(self.run_id, status))

    def get_state(self) -> Any:
        return {"run_id": self.run_id}

    def set_state(self, state: Any) -> None:
        self.run_id = state["run_id"]

    def _begun(self) -> str:
        """The id of a new run."""
        experiment = "0"
        if self._experiment is not None:
            found = self._client.get_experiment_by_name(self._experiment)
            experiment = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        run_id: str = self._client.create_run(experiment, run_name=self._name).info.run_id
        for name, value in self._params.items():
            self._client.log_param(run_id, name, value)
        return run_id

    def _write(self, group: str, step: int, values: Mapping[str, float]) -> None:
        if self._client is not None:
            from mlflow.entities import Metric

            now = int(time.time() * 1000)
            metrics = [Metric(f"{group}/{name}", value, now, step) for name, value in values.items()]
            self._sent.append(self._client.log_batch(self.run_id, metrics=metrics, synchronous=False))
            if len(self._sent) > AHEAD:
                _try(self._sent.pop(0).wait)


def _try(tell: Callable[[], Any]) -> None:
    """Call ``tell``, which tells MLflow's server something. A server that fails ends no training."""
    try:
        tell()
    except Exception as error:
        logging.getLogger("replicax").warning("MLflowLog: numbers, or the end of the run, were lost: %s", error)


def _chiefs_value(run: TrainingRun, value: str | None) -> str | None:
    """The chief's value, on all workers."""
    return run.strategy.extended.replicas.lockstep.from_chief("begins to log a run", value)
