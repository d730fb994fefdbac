"""Snapshots: what is to be written, copied to the host, so that training can go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from replicax.checkpoint.array_leaves import CopiesLeaf, HostArray, Part
from replicax.checkpoint.leaves import IteratorLeaf, Leaves, OptimizerLeaf, PlainLeaf
from replicax.checkpoint.storage.blocks import Block, inside, pieces_of, size_of, whole_block
from replicax.checkpoint.storage.checkpoint_index import (
    ArrayEntry,
    ArrayKind,
    Entry,
    IteratorEntry,
    PlainEntry,
)
from replicax.checkpoint.storage.shared_disks import Groups
from replicax.variables.slots import exchanging

Place = tuple[str, Block]
"""A piece: the name of its array, and which block of it."""


@dataclasses.dataclass
class Snapshot:
    """The values of some leaves at one time, as far as one worker writes them.

    Attributes:
      plain: entries that are no arrays.
      kinds: of the arrays, by name.
      same: names of arrays that have another name, too, under which they are written.
      writers: the pieces that one disk gets, with the worker that writes each.
      pieces: those of this worker.
      copies: of on-read variables, this worker's copies, which are not combined yet.
    """

    plain: dict[str, Entry]
    kinds: dict[str, ArrayKind]
    same: dict[str, str]
    writers: dict[Place, int]
    pieces: dict[Place, HostArray]
    copies: dict[str, tuple[CopiesLeaf, dict[int, HostArray]]]

    def combine(self, everyones: Sequence[Mapping[str, Mapping[int, HostArray]]], worker: int) -> None:
        """Make one value of the copies of all workers, where ``worker`` writes it."""
        for name, (leaf, _) in self.copies.items():
            copies = {replica: copy for theirs in everyones for replica, copy in theirs[name].items()}
            value, block = leaf.combined(copies), whole_block(leaf.kind.shape)
            for (owner, piece), writer in self.writers.items():
                if owner == name and writer == worker:
                    self.pieces[name, piece] = np.asarray(value[inside(piece, block)], order="C")

    def entries(self, keys: Mapping[Place, tuple[str, str]]) -> dict[str, Entry]:
        """All entries, with the pieces that are on one disk."""
        pieces: dict[str, dict[Block, tuple[str, str]]] = {name: {} for name in self.kinds}
        for (name, block), place in keys.items():
            pieces[name][block] = place
        arrays = {name: ArrayEntry(kind, pieces[self.same.get(name, name)]) for name, kind in self.kinds.items()}
        return {**self.plain, **arrays}


def plain_entries(leaves: Leaves) -> dict[str, Entry]:
    """The entries of all leaves that are no arrays.

    Raises:
      ValueError: the place of an iterator can't be saved; says why.
    """
    names = {id(variable): name for name, variable in leaves.variables()}
    found: dict[str, Entry] = {}
    for name, leaf in leaves.by_name.items():
        if isinstance(leaf, PlainLeaf):
            found[name] = PlainEntry(leaf.value)
        elif isinstance(leaf, IteratorLeaf):
            found[name] = IteratorEntry(leaf.state(name))
        elif isinstance(leaf, OptimizerLeaf):
            found[name] = leaf.entry(names)
    return found


def taken(leaves: Leaves, plain: dict[str, Entry], groups: Groups, worker: int) -> Snapshot:
    """The present values of ``leaves``.

    Args:
      leaves: what is to be saved.
      plain: their :func:`plain_entries`.
      groups: the workers that share a disk.
      worker: this one.

    Raises:
      VariableLostError: a variable has no value.
    """
    group = next(g for g in groups if worker in g)
    snapshot = Snapshot(plain, {}, {}, {}, {}, {})
    loads = dict.fromkeys(group, 0)
    first: dict[int, str] = {}
    ready: list[tuple[str, list[Part], int]] = []
    with exchanging():  # all of one step, whatever other threads do
        for name, leaf in leaves.arrays().items():
            snapshot.kinds[name] = leaf.kind
            owner = first.setdefault(id(leaf.owner), name)
            if owner != name:
                snapshot.same[name] = owner
                continue
            if isinstance(leaf, CopiesLeaf):
                snapshot.copies[name] = leaf, leaf.copies()
            # Copies to the host begin here, all of them, and are waited for below.
            ready.append((name, leaf.parts(), leaf.kind.numpy_dtype.itemsize))
        for name, parts, itemsize in ready:
            for part in parts:
                _share_out(snapshot, name, part, itemsize, loads, worker)
    return snapshot


def _share_out(snapshot: Snapshot, name: str, part: Part, itemsize: int, loads: dict[int, int], worker: int) -> None:
    """Give each piece of a part to that one of its workers which has least to write, and copy this worker's."""
    if len(loads) == 1 and part.copy is None and name not in snapshot.copies:
        return  # another disk has it
    for piece in pieces_of(part.block, itemsize):
        if len(loads) == 1:
            writer = worker
        else:
            having = [w for w in loads if w in part.workers]
            if not having:
                return
            writer = min(having, key=lambda w: loads[w])
            loads[writer] += size_of(piece) * itemsize
        snapshot.writers[name, piece] = writer
        if writer == worker and part.copy is not None:
            snapshot.pieces[name, piece] = part.copy(piece)


def as_data(copies: Mapping[str, tuple[Any, dict[int, HostArray]]]) -> dict[str, dict[int, HostArray]]:
    """This worker's copies as they travel."""
    return {name: own for name, (_, own) in copies.items()}
