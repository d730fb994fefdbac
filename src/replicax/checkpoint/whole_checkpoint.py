"""Finding a whole checkpoint: what each worker's disk has of it, whether that is as it was written, and who sends what.

Workers that share a disk all see the whole of it. Where each has its own, a checkpoint is whole if every piece is
whole on some of them; who has none of it gets it from the others.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Mapping, Sequence

from replicax.checkpoint.host_copies import Place
from replicax.checkpoint.storage import manifest
from replicax.checkpoint.storage.blocks import cover, whole_block
from replicax.checkpoint.storage.checkpoint_index import ArrayEntry, CheckpointIndex, loads_index, read_index
from replicax.checkpoint.storage.manifest import DamagedError
from replicax.workers.lockstep import Lockstep

log = logging.getLogger("replicax")


@dataclasses.dataclass(frozen=True)
class WholeCheckpoint:
    """A checkpoint of which every byte is as it was written.

    Attributes:
      path: its folder on this worker, whether it is there or not.
      index: what is in it.
      has_own: whether it is there on this worker.
      holders: the workers that have each piece.
    """

    path: str
    index: CheckpointIndex
    has_own: bool
    holders: Mapping[Place, Sequence[int]]


def find_whole(path: str, lockstep: Lockstep) -> tuple[WholeCheckpoint | None, str]:
    """The checkpoint in ``path``, if it is whole, on which all workers agree; otherwise what is wrong with it.

    Args:
      path: its folder on this worker.
      lockstep: of all workers, each of which comes with its own path.
    """
    mine, problem = _looked_at(path)
    told = lockstep.share("looks for a checkpoint", (_said_of(mine), problem), path)
    problems = {worker: text for worker, (_, text) in enumerate(told) if text is not None}
    found = {worker: theirs for worker, (theirs, _) in enumerate(told) if theirs is not None}
    for id in _in_order(list(found.values())):
        having = {worker: places for worker, (theirs, _, places) in found.items() if theirs == id}
        own = mine if mine is not None and mine.id == id else None
        verdicts = lockstep.share("checks a checkpoint", what_is_wrong(path) if own is not None else None, path)
        problems |= {worker: text for worker, text in enumerate(verdicts) if text is not None}
        having = {worker: places for worker, places in having.items() if verdicts[worker] is None}
        if not having:
            continue
        first = min(having)
        text = lockstep.share("reads an index", own.dumps() if own and lockstep.workers.index == first else None, path)
        index = own or loads_index(text[first])
        holders: dict[Place, list[int]] = {}
        for worker, places in having.items():
            for place in places:
                holders.setdefault(place, []).append(worker)
        if (lacking := _lacking(index, holders)) is None:
            has_own = lockstep.workers.index in having
            return WholeCheckpoint(path, index, has_own, holders), _summary(problems, lockstep)
        problems[first] = f"no worker has all of {lacking}"
    return None, _summary(problems, lockstep) or "there is no such folder"


def _said_of(index: CheckpointIndex | None) -> tuple[str, float, list[Place]] | None:
    return None if index is None else (index.id, index.time, _places(index))


def _in_order(found: Sequence[tuple[str, float, list[Place]]]) -> list[str]:
    """The ids of the saves that disks have under one name: what most have first, and then what is newer.

    There are several if a disk has come back from another run.

    >>> from replicax.checkpoint.whole_checkpoint import _in_order
    >>> _in_order([("a", 1.0, []), ("b", 2.0, []), ("c", 3.0, []), ("b", 2.0, [])])
    ['b', 'c', 'a']
    """
    counts = collections.Counter(id for id, _, _ in found)
    times = {id: time for id, time, _ in found}
    return sorted(counts, key=lambda id: (counts[id], times[id]), reverse=True)


def _looked_at(path: str) -> tuple[CheckpointIndex | None, str | None]:
    """What this worker has, as far as is seen at once; or what is wrong with it."""
    try:
        listed = manifest.read_manifest(path)
        manifest.check_sizes(path, listed)
        index = read_index(path, listed)
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"it can't be read: {error}"
    except DamagedError as error:
        return None, str(error)
    if index.id != listed.id:
        return None, "its index is that of another checkpoint"
    return index, None


def what_is_wrong(path: str) -> str | None:
    """What is wrong with the bytes of a checkpoint in a folder; ``None`` if nothing is."""
    try:
        manifest.check_hashes(path, manifest.read_manifest(path))
    except (DamagedError, OSError) as error:
        return str(error)
    return None


def _places(index: CheckpointIndex) -> list[Place]:
    entries = index.entries.items()
    return [(name, block) for name, entry in entries if isinstance(entry, ArrayEntry) for block in entry.pieces]


def _lacking(index: CheckpointIndex, holders: Mapping[Place, Sequence[int]]) -> str | None:
    """An array of which not every element is somewhere; ``None`` if there is none."""
    blocks: dict[str, list[tuple[tuple[int, int], ...]]] = {}
    for name, block in holders:
        blocks.setdefault(name, []).append(block)
    for name, entry in index.entries.items():
        if isinstance(entry, ArrayEntry) and not cover(whole_block(entry.kind.shape), blocks.get(name, [])):
            return name
    return None


def _summary(problems: Mapping[int, str], lockstep: Lockstep) -> str:
    if not lockstep.several:
        return problems.get(0, "")
    return "; ".join(f"on worker {worker}: {text}" for worker, text in sorted(problems.items()))
