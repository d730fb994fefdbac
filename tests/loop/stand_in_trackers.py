"""Stand-ins for the packages of trackers, also in workers."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import numpy as np
import pytest

import replicax
from replicax.loop import MLflowLog


class FakeClient:
    def __init__(self, calls: list[Any], failure: Exception | None = None) -> None:
        self.calls, self.failure = calls, failure

    def get_experiment_by_name(self, name: str) -> Any:
        return None

    def create_experiment(self, name: str) -> str:
        return f"of {name}"

    def create_run(self, experiment: str, run_name: str | None) -> Any:
        self.calls.append(("begin", experiment, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"run {len(self.calls)}"))

    def log_param(self, run_id: str, name: str, value: Any) -> None:
        self.calls.append(("param", run_id, name, value))

    def update_run(self, run_id: str, status: str) -> None:
        self.calls.append(("again", run_id, status))

    def log_batch(self, run_id: str, metrics: list[Any], synchronous: bool) -> Any:
        self.calls.append(("log", run_id, [(m.key, m.value, m.step) for m in metrics if "examples" not in m.key]))
        return self

    def wait(self) -> None:
        if self.failure is not None:
            raise self.failure

    def set_terminated(self, run_id: str, status: str) -> None:
        self.calls.append(("end", run_id, status))
        self.wait()


def install(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.util.spec_from_loader(name, None)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


def install_mlflow(monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None) -> list[Any]:
    calls: list[Any] = []

    def metric(key: str, value: float, timestamp: int, step: int) -> Any:
        return types.SimpleNamespace(key=key, value=value, step=step)

    install(monkeypatch, "mlflow", MlflowClient=lambda uri: FakeClient(calls, failure))
    install(monkeypatch, "mlflow.entities", Metric=metric)
    return calls


def logged_by_workers() -> tuple[str | None, list[Any]]:
    """What this worker's log has as the id of the run, and what it has told MLflow."""
    strategy = replicax.MultiWorkerMirroredStrategy()
    dataset = strategy.distribute_dataset([np.ones(4, np.float32)])
    with pytest.MonkeyPatch.context() as patch:
        calls = install_mlflow(patch)
        log = MLflowLog("digits")
        replicax.train(lambda x: x.sum(), dataset, 2, log_every=2, callbacks=log, progress=False)
    return log.run_id, calls
