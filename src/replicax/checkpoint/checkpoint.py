"""``Checkpoint``: saves and restores the objects of a run together."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Never

import jax

from replicax import _jax, context
from replicax.argument_checks import checked_folder
from replicax.checkpoint.background_save import BackgroundSave, Write
from replicax.checkpoint.complete_checkpoint import CompleteCheckpoint, find_complete
from replicax.checkpoint.leaves import IteratorLeaf, Leaves, without_name
from replicax.checkpoint.restoration import restored
from replicax.checkpoint.retention import locked
from replicax.checkpoint.saving import Save, carry_out
from replicax.checkpoint.snapshot import SavePlan, plain_entries
from replicax.checkpoint.storage.shared_disks import Groups, groups_sharing
from replicax.errors import CheckpointError, ContextError
from replicax.execution.tracing.stateful_arguments import updated
from replicax.system.folders import make_folder
from replicax.workers import heartbeat
from replicax.workers.exchange import Alone, DistributedWorkers
from replicax.workers.heartbeat_page import Phase
from replicax.workers.lockstep import Lockstep

_counter = itertools.count()

_NEWEST = ". The newest one in a folder: CheckpointManager(checkpoint, folder).restore_latest()"


@_jax.hiding_frames_of
class Checkpoint:
    """The objects of a run, which are saved and restored together.

    Objects are variables, optimizers, metrics, iterators of distributed datasets, JAX and NumPy arrays, random keys,
    numbers, strings, bools and ``None``, and pytrees of these. Each is an attribute with the name that you give it.
    Objects that change in place (variables, optimizers, metrics, iterators, objects of Flax NNX) are restored in place.
    For everything else the attribute gets a new value: assign it before you save, and read it after you have restored.

    The layout of a value does not matter. What was saved under one strategy can be restored under any other, with any
    number of replicas and workers and any global batch size. An on-read variable with an aggregation is saved as its
    aggregated value, and divided again when it is restored: a sum of 7 becomes 3.5 on each of two replicas. Without one
    (or with the sum of bools) each replica's copy is saved, and restored onto as many replicas.

    With several workers all create the same checkpoint, and call its methods together.

    Args:
      *unnamed: nothing: every object needs a name.
      **objects: what to save, by name. The names of ``Checkpoint``'s own methods can't be used.

    Raises:
      TypeError: an object that can't be saved, or without a name; the message names it, and says what can.
      ValueError: no objects; a name that is taken; two leaves of the same name.

    >>> import os, tempfile, replicax
    >>> with replicax.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    ...     w = replicax.Variable([1.0, 2.0], name="w")
    >>> checkpoint = replicax.Checkpoint(model={"w": w}, epoch=3)
    >>> path = os.path.join(tempfile.mkdtemp(), "first")
    >>> checkpoint.save(path)
    >>> with replicax.OneDeviceStrategy("cpu:0").scope():
    ...     v = replicax.Variable([0.0, 0.0])
    >>> other = replicax.Checkpoint(model={"w": v}, epoch=0)
    >>> restored = other.restore(path)
    >>> v.numpy().tolist(), other.epoch
    ([1.0, 2.0], 3)
    """

    def __init__(self, /, *unnamed: Never, **objects: Any) -> None:
        if unnamed:
            raise without_name(unnamed[0])
        if not objects:
            raise ValueError("Checkpoint(**objects) takes what is to be saved, by name, as in Checkpoint(model=…)")
        for name in objects:
            if hasattr(type(self), name) or name.startswith("_"):
                raise ValueError(f"Checkpoint: an object can't be called {name!r}: choose another name")
        self._objects: dict[str, Any] = dict(objects)
        self._optional: tuple[str, ...] = ()  # beginnings of names that a restored checkpoint need not have
        self._background = BackgroundSave()
        self._groups: dict[str, Groups] = {}
        self._plan: SavePlan | None = None
        self._lockstep = lockstep_of(Leaves(objects))

    def __getattr__(self, name: str) -> Any:
        objects = self.__dict__.get("_objects", {})
        if name in objects:
            return objects[name]
        raise AttributeError(f"this Checkpoint has no {name!r}; it has {', '.join(objects)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
            return
        if name not in self._objects:
            raise AttributeError(f"this Checkpoint has no {name!r}; it has {', '.join(self._objects)}")
        self._objects[name] = value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._objects})

    def __repr__(self) -> str:
        return f"Checkpoint({', '.join(self._objects)})"

    @heartbeat.phase(Phase.SAVING)
    def save(self, path: str | os.PathLike[str], wait: bool = True) -> None:
        """Save the present values of the objects.

        It copies them to the host; then a thread writes them, flushes them to the disk, and finally renames the folder
        to ``path``. So the folder is complete or does not exist, whatever happens in between. At most one save is
        running; the next one waits for it.

        Args:
          path: the folder to create, with its parents.
          wait: whether to wait until it is written. If not, the next call of ``save``, ``wait`` or ``restore`` raises
            an error of the save; the end of the program waits for it, too.

        Raises:
          FileExistsError: ``path`` exists already.
          TypeError: it is not a path.
          OSError: nothing can be written there.
          CheckpointError: this save or the previous one failed; says why. No file of it is left.
          ValueError: the place of an iterator can't be saved.
          VariableLostError: a variable has no value.
          RuntimeError: a JAX array has none, as it was donated to a function.
          AbsentDeviceError: the variables are on devices that are only described, and have no values.
          ContextError: called in a step.

        With several workers, one exchange of messages before the copy, and more in the background.
        """
        path = checked_folder(path, "Checkpoint.save(path)")
        self._background.wait()
        self._begin_save(path)
        if wait:
            self._background.wait()

    @heartbeat.phase(Phase.RESTORING)
    def restore(self, path: str | os.PathLike[str], partial: bool = False) -> dict[str, Any]:
        """Restore the saved values of the objects.

        It first checks every byte, and compares all names, shapes and dtypes. An optimizer without state, because no
        step has run, gets one. If there is an error nothing is changed.

        Args:
          path: the folder of a checkpoint.
          partial: whether to ignore what is only in the checkpoint, or only here. What is in both still has to fit.

        Returns:
          The objects, by name.

        Raises:
          FileNotFoundError: there is no checkpoint.
          TypeError: ``path`` is not a path.
          CheckpointError: it is damaged or unfinished; says what is wrong.
          ValueError: it does not fit; lists everything that is missing, extra, or different.
          ContextError: called in a step.
        """
        check_outside("Checkpoint.restore")
        path = checked_folder(path, "Checkpoint.restore(path)", _NEWEST)
        self._background.wait()
        source, problem = find_complete(path, self._lockstep)
        if source is None:
            there = self._lockstep.exchange("looks for a checkpoint", os.path.lexists(path), path)
            if not any(there):
                raise FileNotFoundError(f"there is no checkpoint {path}")
            raise CheckpointError(f"the checkpoint {path} can't be restored: {problem}")
        self._restore_from(source, partial)
        return dict(self._objects)

    @heartbeat.phase(Phase.SAVING)
    def wait(self) -> None:
        """Wait until the current save is written.

        Raises:
          CheckpointError: it could not be written.
        """
        self._background.wait()

    # --- for CheckpointManager and replicax.train -------------------------------------------------------

    def _begin_save(
        self,
        path: str,
        *,
        manager: str | None = None,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        first: Callable[[], None] | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Copy the objects, and write them in the background.

        It calls ``first`` before anything else, and ``then``, in the background, when all workers have written.
        """
        check_outside("Checkpoint.save")
        lockstep = self._lockstep
        leaves = self._present_leaves()
        for _, variable in leaves.variables():
            context.check_present(variable.replicas, "Checkpoint.save")
        plain = plain_entries(leaves)
        with lockstep.failing_together("Checkpoint.save"):
            if first is not None:
                first()
            if self._may_look(path) and os.path.lexists(path):
                raise FileExistsError(f"there is something in {path} already: save to another path, or remove it first")
            make_folder(os.path.dirname(path))
        id, began, plain = lockstep.from_chief("saves a checkpoint", (uuid.uuid4().hex, time.time(), plain))
        groups = self._groups_at(os.path.dirname(path))
        worker = lockstep.workers.index
        if self._plan is None or not self._plan.fits(leaves, groups):
            self._plan = SavePlan(leaves, groups, worker)
        take = self._plan.taken
        series = lockstep.series(f"checkpoint {id}") if lockstep.several else None
        save = Save(path, id, began, manager, step, metrics or {}, groups, worker, series)

        def copy() -> Write:
            snapshot = take(plain)

            def write(is_cancelled: Callable[[], bool]) -> None:
                leads = worker == save.group[0]  # the others write only when this one has come
                with locked(os.path.dirname(path)) if leads else contextlib.nullcontext():
                    carry_out(save, snapshot, is_cancelled)
                if then is not None:
                    then()

            return write

        self._background.begin(copy, lockstep.several)

    def _restore_from(self, source: CompleteCheckpoint, partial: bool = False) -> None:
        self._plan = None  # frees the memory that saves copy to, as restoring needs memory
        with self._lockstep.failing_together("a restore"):
            values = restored(self._objects, source, self._lockstep, ("",) if partial else self._optional)
        self._objects.update({name: updated(self._objects[name], value) for name, value in values.items()})

    def _add_loops_objects(self, name: str, objects: Mapping[str, Any], optional: tuple[str, ...]) -> None:
        """Save ``objects``, too; names that begin with an ``optional`` one may be missing in a checkpoint."""
        if name in self._objects and not self._optional:  # which an earlier run would have set
            raise ValueError(
                f"replicax.train keeps what it needs to go on in the checkpoint, under the name {name!r}, and {self!r} "
                "has an object of that name already: call it something else"
            )
        self._objects[name], self._optional = objects, optional

    def _may_look(self, path: str) -> bool:
        """Return whether this worker checks that the path of a new checkpoint is free."""
        groups = self._groups.get(os.path.dirname(path))
        return groups is None or self._lockstep.workers.index in {group[0] for group in groups}

    def _present_leaves(self) -> Leaves:
        """The present leaves; the same object as at the last save if only values have changed."""
        if self._plan is not None and self._plan.leaves.are_still(self._objects):
            return self._plan.leaves
        return Leaves(self._objects, self._lockstep.workers.count)

    def _groups_at(self, folder: str) -> Groups:
        if folder not in self._groups:
            self._groups[folder] = groups_sharing(folder, self._lockstep)
        return self._groups[folder]


def lockstep_of(leaves: Leaves) -> Lockstep:
    """The lockstep of the workers of the objects; variables that were made outside every scope are as arrays."""
    outside = context.default_strategy().extended.replicas
    found = [variable.replicas.lockstep for _, variable in leaves.variables() if variable.replicas is not outside]
    found += [leaf.lockstep for leaf in leaves.of(IteratorLeaf).values()]
    if found:
        return next((lockstep for lockstep in found if lockstep.several), found[0])
    if _jax.coordination_client() is None or jax.process_count() == 1:
        return Lockstep(Alone())
    return Lockstep(DistributedWorkers(f"replicax/checkpoint {next(_counter)}"))


def check_outside(method: str) -> None:
    """Raise a ContextError if ``method`` was called in a step."""
    if context.in_step():
        raise ContextError(f"{method} was called inside a step, where values are not known yet: call it outside")
