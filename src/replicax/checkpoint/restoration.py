"""Restoring: reads the values of a complete checkpoint block by block, and puts them into objects.

Everything is compared before anything changes. Then it reads some arrays at a time, so that the host never has
more than a part of them. If a worker's own disk lacks a piece, another worker reads it and sends it to all.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax import context
from replicax.checkpoint.array_leaves import ArrayLeaf, DeviceArrayLeaf, HostArrayLeaf, weakly_typed
from replicax.checkpoint.complete_checkpoint import CompleteCheckpoint
from replicax.checkpoint.device_blocks import HostArray, is_large
from replicax.checkpoint.host_copies import Place
from replicax.checkpoint.leaves import IteratorLeaf, Leaves, OptimizerLeaf, tree_of_names
from replicax.checkpoint.matching import check_fits
from replicax.checkpoint.storage.blocks import Block, common, inside, shape_of
from replicax.checkpoint.storage.index import ArrayEntry, IteratorEntry, OptimizerEntry, PlainEntry
from replicax.checkpoint.storage.piece_store import Request, read_pieces
from replicax.errors import CheckpointError
from replicax.training import Optimizer
from replicax.workers.lockstep import Lockstep

BATCH = 128 << 20
"""Groups of arrays up to so many bytes are read together."""


def restored(
    objects: Mapping[str, Any], source: CompleteCheckpoint, lockstep: Lockstep, optional: tuple[str, ...]
) -> dict[str, Any]:
    """Restore saved values; returns the objects, with new ones for those that can't change.

    Names that begin with one of ``optional`` may be only in the checkpoint or only here.

    Raises:
      ValueError: names, shapes or dtypes don't fit, or an iterator can't continue from its place. Nothing has changed.
      CheckpointError: the files have become unreadable since they were checked.
    """
    entries = source.index.entries
    with contextlib.ExitStack() as undo:
        leaves = _with_slots(objects, source, lockstep, undo)
        check_fits(leaves, entries, source.path, optional)
        for _, variable in leaves.variables():
            context.check_present(variable.replicas, "Checkpoint.restore")
        for name, leaf in leaves.of(IteratorLeaf).items():
            if isinstance(entry := entries.get(name), IteratorEntry):
                _set_state(name, leaf, entry.state, undo)
        undo.pop_all()
    values = _arrays(leaves, source, lockstep)
    every: Mapping[str, Any] = leaves.by_name
    for name, leaf in every.items():
        entry = entries.get(name)
        if isinstance(entry, PlainEntry):
            values[name] = entry.value if isinstance(leaf, PlainEntry) else _with_number(leaf, entry.value)
        elif isinstance(leaf, OptimizerLeaf) and isinstance(entry, OptimizerEntry) and not entry.built:
            leaf.optimizer.reset()
    return leaves.rebuilt(values)


def _with_slots(
    objects: Mapping[str, Any], source: CompleteCheckpoint, lockstep: Lockstep, undo: contextlib.ExitStack
) -> Leaves:
    """The leaves, after building optimizers that were saved with slots and have none here."""
    workers = lockstep.workers.count
    leaves = Leaves(objects, workers)
    variables = dict(leaves.variables())
    for name, leaf in leaves.of(OptimizerLeaf).items():
        entry = source.index.entries.get(name)
        optimizer: Optimizer = leaf.optimizer
        if not isinstance(entry, OptimizerEntry) or not entry.built or optimizer.parameters is not None:
            continue
        try:
            if entry.parameters is None:
                raise KeyError
            parameters = jax.tree.map(variables.__getitem__, tree_of_names(entry.parameters))
        except KeyError:
            raise ValueError(
                f"the checkpoint {source.path} has state of {name}, which has none here yet, as it does not know its "
                "variables: call optimizer.build(variables) before the restore, with what apply_gradients will be given"
            ) from None
        undo.callback(optimizer.forget)
        optimizer.build(parameters)
    return Leaves(objects, workers)


def _set_state(name: str, leaf: IteratorLeaf, state: Any, undo: contextlib.ExitStack) -> None:
    before = None
    with contextlib.suppress(ValueError):  # a dataset that can't be repeated
        before = leaf.iterator.get_state()
    try:
        leaf.iterator.set_state(state)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if before is not None:
        undo.callback(leaf.iterator.set_state, before)


def _arrays(leaves: Leaves, source: CompleteCheckpoint, lockstep: Lockstep) -> dict[str, Any]:
    """Restore the arrays; returns the replaced ones."""
    every: Mapping[str, Any] = leaves.by_name
    arrays: dict[str, tuple[ArrayLeaf, ArrayEntry]] = {
        name: (_as_array(entry, lockstep) if _is_replaced(leaf, entry) else leaf, entry)
        for name, leaf in every.items()
        if isinstance(entry := source.index.entries.get(name), ArrayEntry)
    }
    reader = _Reader(source, lockstep, arrays)
    values: dict[str, Any] = {}
    name = ""
    try:
        for batch in _batches(arrays):
            name = batch[0]
            reader.prepare(batch)
            for name in batch:
                leaf, entry = arrays[name]
                value = leaf.restored(lambda block, name=name: reader.read(name, block))  # type: ignore[misc]
                is_weak = entry.kind.is_weak and isinstance(value, jax.Array)
                values[name] = weakly_typed(value) if is_weak else value
            reader.forget()
        lockstep.exchange("has restored a checkpoint", None, source.path)
    except OSError as error:
        raise CheckpointError(
            f"restoring {source.path} was broken off at {name}: {error}. What comes before it has its saved value, and "
            "what comes after it has not: restore another checkpoint"
        ) from error
    return values


def _is_replaced(leaf: Any, entry: ArrayEntry) -> bool:
    """Whether the saved array takes the place of a plain number, or of what a step made of a NumPy array like it."""
    return isinstance(leaf, PlainEntry) or (isinstance(leaf, DeviceArrayLeaf) and leaf.kind != entry.kind)


def _as_array(entry: ArrayEntry, lockstep: Lockstep) -> ArrayLeaf:
    """The leaf to restore a saved array in the place of another: an array of JAX, if that has its dtype."""
    zero, workers = np.zeros(entry.kind.shape, entry.kind.numpy_dtype)[()], lockstep.workers.count
    is_known = jax.dtypes.canonicalize_dtype(zero.dtype) == zero.dtype
    return DeviceArrayLeaf(jnp.asarray(zero), workers) if is_known else HostArrayLeaf(zero, workers)


def _with_number(leaf: ArrayLeaf, number: complex) -> Any:
    """Restore a plain number in the place of an array."""
    with np.errstate(over="ignore"):  # it becomes infinite, as in a step
        value = np.asarray(number, leaf.kind.numpy_dtype)
    restored = leaf.restored(lambda _: value)
    return weakly_typed(restored) if leaf.kind.is_weak else restored


def _batches(arrays: Mapping[str, tuple[ArrayLeaf, ArrayEntry]]) -> Iterator[list[str]]:
    """The names, in groups to read together."""
    batch: list[str] = []
    size = 0
    for name, (_, entry) in arrays.items():
        own = math.prod(entry.kind.shape) * entry.kind.numpy_dtype.itemsize
        if batch and size + own > BATCH:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += own
    if batch:
        yield batch


class _Reader:
    """Reads blocks of the saved arrays; all workers call each method together."""

    def __init__(
        self, source: CompleteCheckpoint, lockstep: Lockstep, arrays: Mapping[str, tuple[ArrayLeaf, ArrayEntry]]
    ) -> None:
        self._source = source
        self._lockstep = lockstep
        self._arrays = arrays
        self._blocks: dict[str, list[Block]] = {}
        for name, block in source.holders:
            self._blocks.setdefault(name, []).append(block)
        self._received: dict[Place, HostArray] = {}
        self._read: dict[Place, HostArray] = {}
        me = lockstep.workers.index
        lacking = [
            place
            for name, (leaf, _) in arrays.items()
            for place in self._pieces(name, leaf.needed())
            if me not in source.holders[place]
        ]
        told = lockstep.exchange("says what its disk lacks", lacking, source.path)
        self._lacking = set().union(*told)

    def prepare(self, names: Sequence[str]) -> None:
        """Read what these arrays need, in parallel; large arrays are read on demand."""
        self._exchange(names)
        wanted = []
        for name in names:
            leaf, entry = self._arrays[name]
            for block in leaf.needed():
                if not is_large(block, entry.kind.numpy_dtype):
                    wanted.append((name, block))
        self._read = dict(zip(wanted, self._read_now(wanted), strict=True))

    def read(self, name: str, block: Block) -> HostArray:
        """A block of an array."""
        found = self._read.get((name, block))
        return self._read_now([(name, block)])[0] if found is None else found

    def forget(self) -> None:
        """Free what was read."""
        self._read, self._received = {}, {}

    def _pieces(self, name: str, blocks: Sequence[Block]) -> list[Place]:
        """The stored pieces that overlap these blocks."""
        stored = self._blocks.get(name, [])
        return [(name, piece) for piece in stored if any(common(piece, block) is not None for block in blocks)]

    def _exchange(self, names: Sequence[str]) -> None:
        """Exchange the pieces of these arrays that some workers lack."""
        pieces = [(name, piece) for name in names for piece in self._blocks.get(name, [])]
        wanted = [place for place in pieces if place in self._lacking]
        if not wanted:
            return
        me = self._lockstep.workers.index
        mine = [place for place in wanted if self._source.holders[place][0] == me]
        for everyones in self._lockstep.exchange(
            "sends pieces", dict(zip(mine, self._read_now(mine), strict=True)), self._source.path
        ):
            self._received |= everyones

    def _read_now(self, places: Sequence[Place]) -> list[HostArray]:
        """Blocks of arrays, assembled from the pieces that overlap them."""
        requests: list[Request] = []
        targets: list[tuple[int, Block]] = []
        sent: list[tuple[tuple[int, Block], HostArray]] = []
        for number, (name, block) in enumerate(places):
            entry = self._arrays[name][1]
            for _, piece in self._pieces(name, [block]):
                part = common(piece, block)
                assert part is not None
                if (name, piece) in self._received:
                    sent.append(((number, part), self._received[name, piece][inside(part, piece)]))
                    continue
                folder, key = entry.pieces[piece]
                where = os.path.join(self._source.path, folder)
                requests.append((where, key, inside(part, piece), entry.kind.numpy_dtype))
                targets.append((number, part))
        arrays: dict[int, HostArray] = {}
        for (number, part), data in itertools.chain(zip(targets, read_pieces(requests), strict=True), sent):
            block = places[number][1]
            if part == block:
                arrays[number] = data
            else:
                array = arrays.setdefault(number, np.empty(shape_of(block), data.dtype))
                array[inside(part, block)] = data
        return [  # an array without elements has no pieces
            arrays[number] if number in arrays else np.empty(shape_of(block), self._arrays[name][1].kind.numpy_dtype)
            for number, (name, block) in enumerate(places)
        ]
