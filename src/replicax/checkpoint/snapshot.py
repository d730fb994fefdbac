"""Snapshots: copies on the host of the values to write, so that training can continue."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from replicax import _jax
from replicax.checkpoint.array_leaves import ArrayLeaf, CopiesLeaf
from replicax.checkpoint.device_blocks import HostArray, Part, PartPiece
from replicax.checkpoint.host_copies import HostCopier, Place
from replicax.checkpoint.leaves import IteratorLeaf, Leaves, OptimizerLeaf
from replicax.checkpoint.storage.blocks import Block, inside, pieces_of, size_of, whole_block
from replicax.checkpoint.storage.index import ArrayEntry, ArrayKind, Entry, IteratorEntry, PlainEntry
from replicax.checkpoint.storage.shared_disks import Groups
from replicax.variables.slots import exchanging


@dataclasses.dataclass
class Snapshot:
    """One worker's part of the values of some leaves at one time."""

    plan: SavePlan
    plain: dict[str, Entry]
    own_pieces: Callable[[], dict[Place, HostArray]]
    """Looks up this worker's pieces, whose values have been copied to the host."""
    copies: dict[str, tuple[CopiesLeaf, dict[int, HostArray]]]
    """This worker's copies of on-read variables, which are not combined yet."""

    def pieces(self, everyones: Sequence[Mapping[str, Mapping[int, HostArray]]], worker: int) -> dict[Place, HostArray]:
        """The pieces that ``worker``, this one, writes, given the copies of all workers."""
        found = self.own_pieces()
        for name, (leaf, _) in self.copies.items():
            copies = {replica: copy for theirs in everyones for replica, copy in theirs[name].items()}
            value, block = leaf.combined(copies), whole_block(leaf.kind.shape)
            for (owner, piece), (folder, _) in self.plan.keys.items():
                if owner == name and folder == folder_of(worker):
                    found[name, piece] = np.asarray(value[inside(piece, block)], order="C")
        return found

    def entries(self) -> dict[str, Entry]:
        """All entries, with the pieces on one disk."""
        kinds, same = self.plan.kinds, self.plan.same
        pieces: dict[str, dict[Block, tuple[str, str]]] = {name: {} for name in kinds}
        for (name, block), place in self.plan.keys.items():
            pieces[name][block] = place
        return {**self.plain, **{n: ArrayEntry(kind, pieces[same.get(n, n)]) for n, kind in kinds.items()}}


def folder_of(worker: int) -> str:
    """The folder, in a checkpoint, of the pieces that a worker writes."""
    return f"arrays-{worker}"


def plain_entries(leaves: Leaves) -> dict[str, Entry]:
    """The entries of all leaves other than arrays."""
    found: dict[str, Entry] = {}
    for name, leaf in leaves.of(PlainEntry, IteratorLeaf, OptimizerLeaf).items():
        if isinstance(leaf, PlainEntry):
            found[name] = leaf
        elif isinstance(leaf, IteratorLeaf):
            found[name] = IteratorEntry(leaf.state(name))
        else:
            found[name] = leaf.entry(leaves.names_of_variables)
    return found


class SavePlan:
    """Assigns the pieces of some leaves to workers, as long as it ``fits``."""

    def __init__(self, leaves: Leaves, groups: Groups, worker: int) -> None:
        self.leaves, self._groups = leaves, groups
        self.kinds: dict[str, ArrayKind] = {}
        self.same: dict[str, str] = {}  # names of arrays that are written under another name
        self.keys: dict[Place, tuple[str, str]] = {}  # of each piece on this disk: the writer's folder, and a number
        self._copies: list[str] = []
        loads = dict.fromkeys(next(group for group in groups if worker in group), 0)
        first: dict[int, str] = {}
        own_pieces: dict[str, list[PartPiece]] = {}
        for name, leaf in leaves.arrays().items():
            self.kinds[name] = leaf.kind
            owner = first.setdefault(id(leaf.owner), name)
            if owner != name:
                self.same[name] = owner
                continue
            if isinstance(leaf, CopiesLeaf):
                self._copies.append(name)
            for part in leaf.parts():
                assigned = self._assign(name, leaf, part, loads, worker)
                if assigned and not isinstance(leaf, CopiesLeaf):
                    own_pieces.setdefault(name, []).extend(assigned)
        self._copier = HostCopier(leaves.arrays(), own_pieces)
        text = repr((sorted(map(repr, self.kinds.items())), sorted(self.same.items()), list(self.keys.items())))
        # The same on all workers that share a disk.
        self.digest = _jax.digested(text.encode())

    def _assign(self, name: str, leaf: ArrayLeaf, part: Part, loads: dict[int, int], worker: int) -> list[PartPiece]:
        """Assign each piece of a part to the one of its workers with least to write; returns this worker's pieces."""
        is_alone = len(loads) == 1  # a single worker may be one of many unrelated processes
        having = [w for w in loads if (part.is_here if is_alone else w in part.workers)]
        if not having:
            return []  # it goes to another disk
        itemsize, own_pieces = leaf.kind.numpy_dtype.itemsize, []
        for piece in pieces_of(part.block, itemsize):
            writer = min(having, key=lambda w: loads[w])
            loads[writer] += size_of(piece) * itemsize
            self.keys[name, piece] = folder_of(writer), str(len(self.keys))
            if writer == worker:
                own_pieces.append(PartPiece.of(part, piece))
        return own_pieces

    def fits(self, leaves: Leaves, groups: Groups) -> bool:
        """Return whether the plan still fits: it is for these leaves, and those saved as one array still are one."""
        arrays: Any = leaves.by_name
        is_same = leaves is self.leaves and groups == self._groups
        return is_same and all(arrays[name].owner is arrays[first].owner for name, first in self.same.items())

    def taken(self, plain: dict[str, Entry]) -> Snapshot:
        """The present values of the leaves, with their :func:`plain_entries`."""
        arrays: Any = self.leaves.by_name  # those with names here
        with exchanging():  # all values from one step, whatever other threads do
            copies = {name: (arrays[name], arrays[name].copies()) for name in self._copies}
            own_pieces = self._copier.copied(arrays)
        return Snapshot(self, plain, own_pieces, copies)
