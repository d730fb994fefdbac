"""Finds a complete checkpoint: what each worker's disk has of it, whether that is intact, and which worker sends what.

Workers that share a disk all see the whole checkpoint. If each has its own disk, a checkpoint is complete if every
piece is intact on one of them; workers that lack pieces get them from others.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Mapping, Sequence

from replicax.checkpoint.host_copies import Place
from replicax.checkpoint.storage import manifest
from replicax.checkpoint.storage.blocks import cover, whole_block
from replicax.checkpoint.storage.index import ArrayEntry, CheckpointIndex, loads_index, read_index
from replicax.checkpoint.storage.manifest import DamagedError
from replicax.workers.lockstep import Lockstep

log = logging.getLogger("replicax")


@dataclasses.dataclass(frozen=True)
class CompleteCheckpoint:
    """A checkpoint with every byte as it was written."""

    path: str
    """Its folder on this worker, which need not exist if other workers have the pieces."""
    index: CheckpointIndex
    holders: Mapping[Place, Sequence[int]]
    """The workers that have each piece."""


def find_complete(path: str, lockstep: Lockstep) -> tuple[CompleteCheckpoint | None, str]:
    """The checkpoint in ``path`` if it is complete and the same for all workers; otherwise what is wrong with it.

    All workers call this, each with its own path.
    """
    disk_index, problem = look_at(path)
    own = None if disk_index is None else (disk_index.id, disk_index.time, _places(disk_index))
    told = lockstep.exchange("looks for a checkpoint", (own, problem), path)
    problems = {worker: text for worker, (_, text) in enumerate(told) if text is not None}
    summaries = {worker: theirs for worker, (theirs, _) in enumerate(told) if theirs is not None}
    for id in _in_order(list(summaries.values())):
        having = {worker: places for worker, (theirs, _, places) in summaries.items() if theirs == id}
        own_index = disk_index if disk_index is not None and disk_index.id == id else None
        verdicts = lockstep.exchange("checks a checkpoint", problem_of(path) if own_index is not None else None, path)
        problems |= {worker: text for worker, text in enumerate(verdicts) if text is not None}
        having = {worker: places for worker, places in having.items() if verdicts[worker] is None}
        if not having:
            continue
        first = min(having)
        text = lockstep.exchange(
            "reads an index", own_index.dumps() if own_index and lockstep.workers.index == first else None, path
        )
        index = own_index or loads_index(text[first])
        holders: dict[Place, list[int]] = {}
        for worker, places in having.items():
            for place in places:
                holders.setdefault(place, []).append(worker)
        if (lacking := _lacking(index, holders)) is None:
            return CompleteCheckpoint(path, index, holders), _summary(problems, lockstep)
        problems[first] = f"no worker has all of {lacking}"
    return None, _summary(problems, lockstep) or "there is no such folder"


def _in_order(found: Sequence[tuple[str, float, list[Place]]]) -> list[str]:
    """The ids of the saves that disks have under one name: the most frequent first, then the newest.

    There are several if a disk has come back from another run.

    >>> _in_order([("a", 1.0, []), ("b", 2.0, []), ("c", 3.0, []), ("b", 2.0, [])])
    ['b', 'c', 'a']
    """
    counts = collections.Counter(id for id, _, _ in found)
    times = {id: time for id, time, _ in found}
    return sorted(counts, key=lambda id: (counts[id], times[id]), reverse=True)


def look_at(path: str) -> tuple[CheckpointIndex | None, str | None]:
    """Read this worker's index, without the pieces; or return what is wrong with it."""
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


def problem_of(path: str) -> str | None:
    """Return what is wrong with the bytes of a checkpoint in a folder; ``None`` if they are intact."""
    try:
        manifest.check_hashes(path, manifest.read_manifest(path))
    except (DamagedError, OSError) as error:
        return str(error)
    return None


def _places(index: CheckpointIndex) -> list[Place]:
    entries = index.entries.items()
    return [(name, block) for name, entry in entries if isinstance(entry, ArrayEntry) for block in entry.pieces]


def _lacking(index: CheckpointIndex, holders: Mapping[Place, Sequence[int]]) -> str | None:
    """An array with elements that no worker has; ``None`` if there is none."""
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
