"""Trackers with the real packages, offline: what is in their files, and a resume in the same run."""

from __future__ import annotations

import pathlib
import struct
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import replicax

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")


def train(callback: Any, steps: int, folder: pathlib.Path) -> None:
    strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        v = replicax.Variable(0.0, name="v")

    def step(x: Any) -> Any:
        v.assign(v.value + 1.0)
        return v.value

    dataset = strategy.distribute_dataset([np.ones(4, np.float32)])
    replicax.train(step, dataset, steps, checkpoints=folder, callbacks=callback, log_every=2, progress=False)


def records_in(file: bytes) -> Iterator[bytes]:
    """What stands in a file of W&B: blocks of 32 KB, of records in parts (checksum, length, and which part it is)."""
    at, parts = 7, b""
    while at + 7 <= len(file):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, part = struct.unpack("<HB", file[at + 4 : at + 7])
        parts += file[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # the only, or the last one
            yield parts
            parts = b""


def finished_run(file: pathlib.Path) -> list[Any]:
    """The records of a W&B run, whose service may write them after the run has finished."""
    from wandb.proto import wandb_internal_pb2

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        records = [wandb_internal_pb2.Record.FromString(data) for data in records_in(file.read_bytes())]
        if records and records[-1].WhichOneof("record_type") == "exit":
            return records
        time.sleep(0.1)
    raise TimeoutError(f"{file} has no end")


def test_wandb_offline(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for steps in (4, 6):
        log = replicax.loop.WandbLog("digits", mode="offline", dir=str(tmp_path), config={"rate": 0.1})
        train(log, steps, tmp_path / "checkpoints")
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({file.stem for file in files}) == 1
    logged = []
    for record in (record for file in files for record in finished_run(file)):
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            logged.append((int(items["step"]), float(items["train/loss"])))
    assert sorted(logged) == [(2, 2.0), (4, 4.0), (6, 6.0)]


def test_mlflow_in_a_database(tmp_path: pathlib.Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for steps in (4, 6):
        log = replicax.loop.MLflowLog("digits", tracking_uri=uri, params={"rate": 0.1})
        train(log, steps, tmp_path / "checkpoints")
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("digits")
    [run] = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(2, 2.0), (4, 4.0), (6, 6.0)]
    assert (run.info.status, run.data.params) == ("FINISHED", {"rate": "0.1"})
