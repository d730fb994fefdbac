"""Trackers: what they are told, and when; ``tests/integration/test_trackers.py`` has the real packages."""

from __future__ import annotations

import importlib.util
import pathlib
import types
from typing import Any

import numpy as np
import pytest

import replicax
from replicax.loop import MLflowLog, WandbLog
from replicax.loop.logs import trackers
from tests import processes
from tests.conftest import strategy_of
from tests.loop.stand_in_trackers import FakeClient, install, install_mlflow, logged_by_workers


class FakeRun:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.logged, self.exit_code = options, [], None

    def define_metric(self, name: str, **options: Any) -> None:
        pass

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """The runs of a stand-in for wandb."""
    runs: list[FakeRun] = []

    def init(**options: Any) -> FakeRun:
        runs.append(FakeRun(options))
        return runs[-1]

    install(monkeypatch, "wandb", init=init)
    return runs


def run_of(callback: Any, steps: int, folder: pathlib.Path | None = None, step: Any = None) -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        v = replicax.Variable(0.0, name="v")

    def count(x: Any) -> Any:
        v.assign(v.value + 1.0)
        return v.value

    dataset = strategy.distribute_dataset([np.ones(4, np.float32)])
    replicax.train(
        step or count, dataset, steps, checkpoints=folder, callbacks=callback, log_every=2, progress=False,
        evaluate=lambda: {"accuracy": 0.5}, evaluate_every=4,
    )  # fmt: skip


def test_wandb_gets_the_numbers_and_goes_on_in_the_same_run(wandb_runs: list[FakeRun], tmp_path: pathlib.Path) -> None:
    run_of(WandbLog("digits", name="first", mode="offline"), 4, tmp_path)
    run_of(WandbLog("digits", name="first", mode="offline"), 6, tmp_path)
    first, second = wandb_runs
    assert first.options == {
        "project": "digits", "name": "first", "mode": "offline", "id": second.options["id"], "resume": "allow",
    }  # fmt: skip
    numbers = [{k: v for k, v in values.items() if "examples" not in k} for values in first.logged]
    assert numbers == [
        {"step": 2, "train/loss": 2.0}, {"step": 4, "train/loss": 4.0}, {"step": 4, "evaluation/accuracy": 0.5},
    ]  # fmt: skip
    assert [values["step"] for values in second.logged] == [6, 6]
    assert first.exit_code == second.exit_code == 0


def test_another_run_without_a_checkpoint_is_another_one(
    wandb_runs: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, logs = install_mlflow(monkeypatch), [WandbLog("digits"), MLflowLog()]
    for _ in range(2):
        run_of(logs, 2)
    assert wandb_runs[0].options["id"] != wandb_runs[1].options["id"]
    assert [call for call, *_ in calls if call in ("begin", "again")] == ["begin", "begin"]


def test_each_log_goes_on_in_the_run_of_its_project(
    wandb_runs: list[FakeRun], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    calls = install_mlflow(monkeypatch)
    for steps, names in ((2, ("digits", "letters")), (4, ("letters", "digits"))):
        run_of([kind(name) for name in names for kind in (WandbLog, MLflowLog)], steps, tmp_path)
    ids = [(run.options["project"], run.options["id"]) for run in wandb_runs]
    assert ids[2:] == ids[1::-1]
    assert [run for call, run, *_ in calls if call == "again"] == ["run 2", "run 1"]


def fail(x: Any) -> Any:
    raise ArithmeticError("in the step")


def test_a_run_that_failed_is_marked_so(wandb_runs: list[FakeRun], monkeypatch: pytest.MonkeyPatch) -> None:
    calls, logs = install_mlflow(monkeypatch), [WandbLog(), MLflowLog()]
    try:
        run_of(logs, 2, step=fail)
    except ArithmeticError:
        run_of(logs, 2)
    assert ([run.exit_code for run in wandb_runs], logs[0].run) == ([1, 0], None)
    assert [status for call, _, status, *_ in calls if call == "end"] == ["FAILED", "FINISHED"]


def test_a_log_that_is_not_of_the_chief_keeps_no_exception(
    wandb_runs: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_mlflow(monkeypatch)
    run: Any = types.SimpleNamespace(is_chief=False, resumed_at=3, strategy=strategy_of(1))
    logs = [WandbLog(), MLflowLog()]
    try:
        raise ArithmeticError
    except ArithmeticError:
        for log in logs:
            log.on_start(run)
            log.on_end(run)
    assert [log._handled for log in logs] == [None, None]


def test_mlflow_gets_the_numbers_and_goes_on_in_the_same_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    calls = install_mlflow(monkeypatch)
    for steps in (4, 6):
        run_of(MLflowLog("digits", name="first", params={"rate": 0.1}), steps, tmp_path)
    assert calls == [
        ("begin", "of digits", "first"),
        ("param", "run 1", "rate", 0.1),
        ("log", "run 1", [("train/loss", 2.0, 2)]),
        ("log", "run 1", [("train/loss", 4.0, 4)]),
        ("log", "run 1", [("evaluation/accuracy", 0.5, 4)]),
        ("end", "run 1", "FINISHED"),
        ("again", "run 1", "RUNNING"),
        ("log", "run 1", [("train/loss", 6.0, 6)]),
        ("log", "run 1", [("evaluation/accuracy", 0.5, 6)]),
        ("end", "run 1", "FINISHED"),
    ]


# MLflow's own exceptions are no more than an Exception.
@pytest.mark.parametrize("kind", [ConnectionError, Exception])
def test_a_server_that_fails_ends_no_training(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = install_mlflow(monkeypatch, kind("the server is gone"))
    run_of(MLflowLog(), 4)
    assert calls[-1] == ("end", "run 1", "FINISHED")
    assert caplog.text.count("were lost: the server is gone") == 4  # those of two steps, an evaluation, the end


def test_all_workers_know_the_run_that_the_chief_begins_and_tells_mlflow_of() -> None:
    chief, other = processes.run(logged_by_workers, workers=2)
    assert chief[0] == "run 1"
    assert [(what, run) for what, run, *_ in chief[1]] == [("begin", "of digits"), ("log", "run 1"), ("end", "run 1")]
    assert other == ("run 1", [])


def test_few_messages_are_on_their_way_to_a_slow_server(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install_mlflow(monkeypatch)
    monkeypatch.setattr(FakeClient, "wait", lambda self: calls.append(("arrived",)))
    monkeypatch.setattr(trackers, "AHEAD", 2)
    run_of(MLflowLog(), 10)
    kinds = [kind for kind, *_ in calls]
    ahead = [kinds[:i].count("log") - kinds[:i].count("arrived") for i in range(len(kinds))]
    assert (max(ahead), ahead[kinds.index("end")]) == (3, 0)


@pytest.mark.parametrize(("log", "package"), [(WandbLog, "wandb"), (MLflowLog, "mlflow")])
def test_a_package_that_is_not_there_is_named(log: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf"needs the package {package}.*pip install 'replicax\[{package}\]'"):
        log()


def test_the_run_says_which_run_it_is(wandb_runs: list[FakeRun]) -> None:
    with pytest.raises(TypeError, match="'id' is set by the run"):
        WandbLog("digits", id="mine")
