"""Metric files: the numbers of a run as CSV and as TensorBoard event files."""

from __future__ import annotations

import contextlib
import csv
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from replicax import _jax
from replicax.argument_checks import checked_path
from replicax.loop.callbacks import NumbersLog
from replicax.loop.training_run import TrainingRun
from replicax.system.folders import make_folder, naming
from replicax.system.packages import check_installed


class CSVLog(NumbersLog):
    """Writes ``train.csv`` and ``evaluation.csv``: a row for each logging interval, and for each evaluation.

    The first column is the step. A resumed run goes on in the same files: rows of later steps than the one that it
    went on from are taken away, as these steps come again.

    Args:
      folder: is made if it is not there.

    >>> import pathlib, tempfile, replicax, numpy as np
    >>> folder = tempfile.mkdtemp()
    >>> dataset = replicax.get_strategy().distribute_dataset([np.arange(4.0)])
    >>> log = replicax.CSVLog(folder)
    >>> run = replicax.train(lambda x: x.sum(), dataset, 4, log_every=2, callbacks=[log], progress=False)
    >>> lines = pathlib.Path(folder, "train.csv").read_text().splitlines()
    >>> lines[0], [line.split(",")[:2] for line in lines[1:]]
    ('step,loss,examples_per_second', [['2', '6.0'], ['4', '6.0']])
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = pathlib.Path(checked_path(folder, "replicax.CSVLog(folder)"))
        self._tables: dict[str, _Table] = {}

    def on_start(self, run: TrainingRun) -> None:
        if run.is_chief:
            make_folder(str(self.folder))
            for name in ("train", "evaluation"):
                self._tables[name] = _Table(self.folder / f"{name}.csv", run.resumed_at)

    def _write(self, group: str, step: int, values: Mapping[str, float]) -> None:
        if group in self._tables:  # of the chief
            self._tables[group].add(step, values)


class _Table:
    """A CSV file that grows.

    If there is such a file already, its rows up to step ``keep`` stay; none do if that is ``None``.
    """

    def __init__(self, path: pathlib.Path, keep: int | None) -> None:
        self._path = path
        self._keep = keep
        self._columns: list[str] = []
        rows: list[dict[str, str]] = []
        if keep is not None and path.is_file():
            with (
                path.open(newline="", errors="replace") as file,
                contextlib.suppress(csv.Error),
            ):  # rows before the damage
                reader = csv.DictReader(file)
                self._columns = list(reader.fieldnames or ())
                for row in reader:
                    if (row.get("step") or "").isdecimal() and int(row["step"]) <= keep:
                        rows.append(row)
        if self._columns:
            self._write(rows)
        else:
            path.unlink(missing_ok=True)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        row = {"step": str(step), **{name: repr(value) for name, value in values.items()}}
        new = [name for name in row if name not in self._columns]
        if new or step == self._keep:  # an evaluation that an earlier attempt made after the checkpoint comes again
            rows = []
            if self._columns:
                with self._path.open(newline="") as file:
                    rows = [earlier for earlier in csv.DictReader(file) if earlier["step"] != row["step"]]
            self._columns += new
            self._write(rows)
        with naming(self._path), self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns, restval="", lineterminator="\n").writerow(row)

    def _write(self, rows: list[dict[str, str]]) -> None:
        part = self._path.with_suffix(".part")
        with naming(part), part.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="", extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        part.replace(self._path)


@_jax.hiding_frames_of
class TensorBoardLog(NumbersLog):
    """Writes event files, which TensorBoard shows: ``tensorboard --logdir FOLDER``.

    Numbers of the training are called ``train/…``, those of evaluations ``evaluation/…``. After a resume TensorBoard
    leaves out what an earlier attempt wrote of later steps.

    Args:
      folder: is made if it is not there.

    Raises:
      ImportError: the package tensorboardX is not installed.

    >>> import contextlib, replicax
    >>> with contextlib.suppress(ImportError):
    ...     callbacks = [replicax.TensorBoardLog("runs/first")]
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        check_installed("replicax.TensorBoardLog", "tensorboardX", "tensorboard")
        self.folder = pathlib.Path(checked_path(folder, "replicax.TensorBoardLog(folder)"))
        self._writer: Any = None

    def on_start(self, run: TrainingRun) -> None:
        if run.is_chief:
            from tensorboardX import SummaryWriter

            make_folder(str(self.folder))
            purge = None if run.resumed_at is None else run.resumed_at + 1
            # The name has the second: the rest tells files of one apart. TensorBoard reads files in the order of names.
            suffix = f".{time.time_ns()}"
            self._writer = SummaryWriter(str(self.folder), purge_step=purge, filename_suffix=suffix)

    def on_end(self, run: TrainingRun) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, group: str, step: int, values: Mapping[str, float]) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(f"{group}/{name}", value, step)
