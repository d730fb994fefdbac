"""Saving: writes a snapshot as a checkpoint, completely or not at all.

Everything is written into a folder whose name marks it as unfinished, and flushed to the disk. Then the manifest is
written, and the folder gets its name. With several workers each writes its pieces and tells the others their hashes;
after that the first worker of each disk finishes the folder there. All of this happens in the background.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from replicax.checkpoint.snapshot import Snapshot, folder_of
from replicax.checkpoint.storage import manifest
from replicax.checkpoint.storage.index import NAME as INDEX_NAME, CheckpointIndex
from replicax.checkpoint.storage.manifest import Manifest
from replicax.checkpoint.storage.piece_store import write_pieces
from replicax.checkpoint.storage.shared_disks import Groups
from replicax.errors import CheckpointError, described
from replicax.workers.codec import dumps, loads
from replicax.workers.exchange import Series, never

PATIENCE = 3600.0
"""For how many seconds a worker waits for others that write more, or to slower disks."""


@dataclasses.dataclass(frozen=True)
class Save:
    """A checkpoint to write, and the workers that write it."""

    path: str  # its folder, on this worker
    id: str  # of the save
    time: float  # when the save began, in seconds since 1970 by the chief's clock
    manager: str | None  # the id of the manager, if there is one
    step: int | None  # the number of steps before it, if there is a manager
    metrics: Mapping[str, float]  # from the user
    groups: Groups  # the workers that share a disk
    worker: int  # this one
    series: Series | None  # exchanges of the workers; ``None`` if there is only one

    @property
    def unfinished(self) -> str:
        """The folder for its unfinished files."""
        owner = "" if self.manager is None else f"{self.manager[:8]}-"
        return f"{self.path}{UNFINISHED}{owner}{self.id[:8]}"

    @property
    def group(self) -> tuple[int, ...]:
        """The workers that write to this disk."""
        return next(group for group in self.groups if self.worker in group)


UNFINISHED = ".unfinished-"
_FAILED = "could not be written"
_UNCERTAIN = "may be whole or not, as a worker did not confirm it, and a run goes on from it only if it is"


def carry_out(save: Save, snapshot: Snapshot, is_cancelled: Callable[[], bool] = never) -> None:
    """Write a checkpoint, together with the other workers.

    Raises:
      CheckpointError: this worker or another one could not write it; says why. No file of it is left. Or a worker has
        died when others may have finished it.
    """
    exchange = _Exchange(save, is_cancelled)
    everyones = exchange.gather((snapshot.plan.digest, {name: own for name, (_, own) in snapshot.copies.items()}))
    for first, worker in ((group[0], worker) for group in save.groups for worker in group):
        if everyones[worker][0] != everyones[first][0]:
            raise CheckpointError(
                f"the checkpoint {save.path} {_FAILED}: worker {worker} saves other objects than worker "
                f"{first}, or they lie elsewhere there; all workers must save the same"
            )
    files, problem, is_finished = {}, None, False
    try:
        files = _write_own(save, snapshot, [copies for _, copies in everyones])
    except Exception as error:
        problem = error
    try:
        finishes_alone = len(save.groups) == 1 and save.worker == save.group[0]
        everyones = exchange.gather(files, problem, _FAILED if finishes_alone else _UNCERTAIN)
        if save.worker == save.group[0]:
            try:
                _finish(save, snapshot, {name: f for w in save.group for name, f in everyones[w].items()})
                is_finished = True
                manifest.flush(os.path.dirname(save.path))
            except Exception as error:
                problem = error
        exchange.gather(None, problem, _UNCERTAIN)
    except CheckpointError:
        if save.worker == save.group[0]:
            shutil.rmtree(save.unfinished, ignore_errors=True)
            if exchange.has_failed and is_finished:  # but not on another disk, or its name was not flushed
                shutil.rmtree(save.path, ignore_errors=True)
        raise


def _write_own(save: Save, snapshot: Snapshot, everyones: Sequence[Any]) -> dict[str, tuple[int, str]]:
    """Write this worker's pieces, given the copies of all; returns sizes and hashes of the files."""
    pieces = snapshot.pieces(everyones, save.worker)
    if not pieces:
        return {}
    os.makedirs(save.unfinished, exist_ok=True)
    own = folder_of(save.worker)
    folder = os.path.join(save.unfinished, own)
    write_pieces(folder, {snapshot.plan.keys[place][1]: array for place, array in pieces.items()})
    pieces.clear()
    manifest.flush_below(folder)
    return manifest.hashes(save.unfinished, manifest.files_below(save.unfinished, own))


def _finish(save: Save, snapshot: Snapshot, files: dict[str, tuple[int, str]]) -> None:
    index = CheckpointIndex(save.id, save.time, save.step, save.metrics, snapshot.entries())
    os.makedirs(save.unfinished, exist_ok=True)
    manifest.write_flushed(os.path.join(save.unfinished, INDEX_NAME), index.dumps())
    files = {**files, **manifest.hashes(save.unfinished, [INDEX_NAME])}
    listed = Manifest(save.id, save.manager, save.step, dict(sorted(files.items())))
    manifest.write_flushed(os.path.join(save.unfinished, manifest.NAME), listed.dumps())
    manifest.flush(save.unfinished)
    try:
        os.rename(save.unfinished, save.path)
    except OSError as error:
        if not os.path.lexists(save.path):
            raise
        raise FileExistsError(
            f"it exists already ({error.strerror}): another run may save in this folder; give each run one of its own"
        ) from error


class _Exchange:
    """Exchanges the progress of the workers; a failure on one worker raises on all."""

    def __init__(self, save: Save, is_cancelled: Callable[[], bool]) -> None:
        self._save = save
        self._gives_up = is_cancelled
        self.has_failed = False  # reported by another worker; one that died may have finished before

    def gather(self, item: Any, problem: Exception | None = None, otherwise: str = _FAILED) -> list[Any]:
        """The items of all workers; raises a CheckpointError on all if one has a ``problem``.

        If a worker does not come, the error says what has become of the checkpoint then: ``otherwise``.
        """
        save = self._save
        what = f"the checkpoint {save.path} {_FAILED}"
        if save.series is None:
            if problem is not None:
                self.has_failed = True
                raise CheckpointError(f"{what}: {described(problem)}") from problem
            return [item]
        message = dumps((None if problem is None else described(problem), item))
        try:
            said = [loads(told) for told in save.series.exchange(message, PATIENCE, self._gives_up)]
        except Exception as error:
            if problem is not None:  # then no worker can finish it
                raise CheckpointError(f"{what}: {described(problem)}") from problem
            raise CheckpointError(f"the checkpoint {save.path} {otherwise}: {described(error)}") from error
        for worker, (text, _) in enumerate(said):
            if text is not None:
                self.has_failed = True
                raise CheckpointError(f"{what}: on worker {worker}: {text}") from problem
        return [theirs for _, theirs in said]
