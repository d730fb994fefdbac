"""The folder of a manager: finds the checkpoints in it, and deletes this manager's old ones.

A file in the folder has an id, and so has each checkpoint that is written there. Checkpoints with another id, with
none, or with files that were not written with them belong to others and stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from typing import Literal

from replicax.checkpoint.complete_checkpoint import look_at, problem_of
from replicax.checkpoint.saving import UNFINISHED
from replicax.checkpoint.storage import manifest
from replicax.checkpoint.storage.manifest import DamagedError, Manifest
from replicax.system.folders import make_folder
from replicax.system.json_files import read_json

log = logging.getLogger("replicax")

Best = tuple[str, Literal["min", "max"]]
"""The name of a metric, and whether the lowest or the highest value is best."""

OWNER = "manager.json"
"""The file with the folder's id, which managers lock while they save."""

METRICS = "metrics.json"
"""The file with the metrics that were not known when their checkpoint was saved, by its id."""
_NAME = re.compile(r"step-(\d{8,})")


class Folder:
    """The folder of a manager, on one disk."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.id: str | None = None  # of every checkpoint that is written here; known after `own`
        self._warned: set[int] = set()  # steps whose checkpoint has files of others: each is logged once

    def own(self) -> None:
        """Read the folder's id, or create one; a folder that was deleted gets the same again."""
        file = os.path.join(self.path, OWNER)
        if not os.path.lexists(file):
            new = f"{file}.{uuid.uuid4().hex[:8]}"
            try:
                manifest.write_flushed(new, json.dumps({"format": 1, "id": self.id or uuid.uuid4().hex}))
                _give_name(new, file)
                manifest.flush(self.path)
            except OSError as error:
                why = f"the folder of checkpoints {self.path} can't be written to: {error.strerror}"
                raise type(error)(error.errno, why) from error
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(new)
        try:
            self.id = str(read_json(file)["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise OSError(f"{file} can't be read, by which {self.path} is known: {error}; remove it") from error

    def path_of(self, step: int) -> str:
        """The folder of the checkpoint of a step."""
        return os.path.join(self.path, f"step-{step:08d}")

    def steps(self) -> list[int]:
        """The steps with a checkpoint, even a damaged one; the newest last."""
        return sorted(int(found[1]) for name in self._names() if (found := _NAME.fullmatch(name)))

    def unfinished(self) -> list[str]:
        """The names of the remains of interrupted saves."""
        return sorted(n for n in self._names() if UNFINISHED in n and _NAME.fullmatch(n.split(UNFINISHED)[0]))

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except FileNotFoundError:  # it was deleted
            return []

    def complete(self) -> dict[int, dict[str, float]]:
        """The metrics of each step whose checkpoint has all its files; does not read their bytes."""
        indices = {step: look_at(self.path_of(step))[0] for step in self.steps()}
        later = self._later_metrics()
        return {step: {**index.metrics, **later.get(index.id, {})} for step, index in indices.items() if index}

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics of a checkpoint that were not known when it was saved."""
        index, _ = look_at(self.path_of(step))
        if index is None:
            return
        file = os.path.join(self.path, METRICS)
        manifest.write_flushed(f"{file}.new", json.dumps(self._later_metrics() | {index.id: dict(metrics)}))
        os.replace(f"{file}.new", file)
        manifest.flush(self.path)

    def _later_metrics(self) -> dict[str, dict[str, float]]:
        file = os.path.join(self.path, METRICS)
        try:
            return {id: {name: float(value) for name, value in found.items()} for id, found in read_json(file).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            log.warning("%s, which has metrics of checkpoints, can't be read: %s", file, error)
            return {}

    def make_room(self, step: int, is_damaged: bool) -> None:
        """Rename an incomplete checkpoint of a step; raises a FileExistsError if it is complete."""
        if not os.path.lexists(os.path.join(self.path, OWNER)):  # the folder was deleted
            make_folder(self.path)
            self.own()
        path = self.path_of(step)
        if not os.path.lexists(path):
            return
        if not is_damaged and problem_of(path) is None:
            raise FileExistsError(
                f"there is a checkpoint {path} now, which this manager has not written; another run may save in this "
                "folder: give each run one of its own"
            )
        number = 1
        while os.path.lexists(f"{path}.damaged-{number}"):
            number += 1
        os.rename(path, f"{path}.damaged-{number}")
        log.warning("%s is damaged, and has been renamed to %s.damaged-%d", path, path, number)

    def keep(self, newest: int | None, best: Best | None) -> None:
        """Delete this manager's checkpoints except the newest and the best, and the remains of interrupted saves."""
        with locked(self.path, alone=True) as is_free:
            for name in self.unfinished() if is_free else ():
                if f"{UNFINISHED}{str(self.id)[:8]}-" in name:
                    with contextlib.suppress(FileNotFoundError):  # another manager of this folder deletes it
                        shutil.rmtree(os.path.join(self.path, name))
        if newest is None:
            return
        complete = self.complete()
        own = [
            step
            for step in complete
            if (listed := self._own_listing(step)) is not None and self._has_no_more(step, listed)
        ]
        kept = {*own[-newest:], best_of(complete, best)}
        for step in own:
            if step in kept:
                continue
            gone = f"{self.path_of(step)}{UNFINISHED}{str(self.id)[:8]}-deleted"
            with contextlib.suppress(FileNotFoundError):
                os.rename(self.path_of(step), gone)  # so the path never has a part of it
                shutil.rmtree(gone)

    def _own_listing(self, step: int) -> Manifest | None:
        try:
            listed = manifest.read_manifest(self.path_of(step))
        except (DamagedError, OSError):
            return None
        return listed if listed.manager == self.id and listed.step == step else None

    def _has_no_more(self, step: int, listed: Manifest) -> bool:
        more: set[str] = set()
        with contextlib.suppress(FileNotFoundError):  # another manager of this folder deletes it
            more = {*manifest.files_below(self.path_of(step))} - {*listed.files, manifest.NAME}
        if more and step not in self._warned:
            self._warned.add(step)
            log.warning("%s is kept, as it has %s, which is not the manager's", self.path_of(step), min(more))
        return not more


@contextlib.contextmanager
def locked(folder: str, alone: bool = False) -> Iterator[bool]:
    """Lock a manager's folder, together with others or alone; alone it does not wait for them.

    Yields whether others have no lock now: then every unfinished checkpoint in the folder is of a save that was broken
    off. File systems without locks can't tell.
    """
    is_free = True
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(os.path.join(folder, OWNER), "rb+" if alone else "rb"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # in processes that were forked meanwhile, too
        except BlockingIOError:
            is_free = False
        except OSError:
            pass  # a file system without locks
        yield is_free


def _give_name(file: str, name: str) -> None:
    """Make ``name`` a name of ``file``, unless another process has made one of that name meanwhile."""
    try:
        os.link(file, name)
    except FileExistsError:
        pass
    except OSError:  # a file system without links, where the last one wins
        os.rename(file, name)


def best_of(steps: Mapping[int, Mapping[str, float]], best: Best | None) -> int | None:
    """The latest step with the best metric; ``None`` if no step has the metric.

    >>> best_of({1: {"loss": 2.0}, 2: {"loss": 1.0}, 3: {"loss": float("nan")}, 4: {}}, ("loss", "min"))
    2
    """
    if best is None:
        return None
    name, direction = best
    values = {step: metrics[name] for step, metrics in steps.items() if not math.isnan(metrics.get(name, math.nan))}
    sign = 1 if direction == "max" else -1
    return max(values, key=lambda step: (sign * values[step], step), default=None)
