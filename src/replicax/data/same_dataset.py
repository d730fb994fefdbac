"""Checks that all workers have been given the same dataset, before any worker reads it.

Workers share files by their places in a list, and rows by their places in a batch. If one has another list or another
order, examples are lost or read twice without any other error.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from replicax import _jax
from replicax._grain import graph
from replicax.workers.codec import dumps
from replicax.workers.digests import digest

if TYPE_CHECKING:
    from replicax.data.reading.batches import Reading
    from replicax.data.reading.sources import Source
    from replicax.workers.lockstep import Lockstep

_SAMPLES = 8

File = tuple[str, int | None]
"""A file's name, without its directory, which may differ between hosts; and its size, if it exists."""


def check_same_dataset(source: Source, reading: Reading, policy: str, lockstep: Lockstep, method: str) -> None:
    """Raise unless all workers have been given the same dataset, as far as that is known without reading it."""
    if not lockstep.several:
        return
    files = [_file(path) for path in reading.files or ()]
    mine = {
        "the policy": policy,
        "the dataset": source.kind,
        "the number of batches": reading.length,
        "the number of examples in a batch": reading.examples,
        "what a saved state knows it by": reading.known_by,
        "the list of its seeds": graph.seeds(source.dataset),
        "files": _jax.digested(dumps(files)),
        "the examples in memory": _samples(source.dataset),
    }
    everyones = lockstep.exchange("distributes a dataset", mine, source.kind)
    if len({theirs["files"] for theirs in everyones}) > 1:
        lists = lockstep.exchange("compares the files of a dataset", files)
        other = next(worker for worker, theirs in enumerate(lists) if theirs != lists[0])
        raise ValueError(
            f"{method}: the workers were given different files: {_difference(lists[0], lists[other], other)}. All "
            "workers must have the same files in the same order, as each reads some of them; sort what a search finds."
        )
    for worker, theirs in enumerate(everyones):
        for what, value in theirs.items():
            if value != everyones[0][what]:
                if what == "the examples in memory":
                    raise ValueError(
                        f"{method}: worker {worker} has other examples in memory than worker 0, or has them in another "
                        "order. All workers must make the same dataset, as each reads some rows of it: shuffle with a "
                        "seed that all have; or, if each is to have a dataset of its own, use auto_shard_policy='off' "
                        "or distribute_datasets_from_function."
                    )
                raise ValueError(
                    f"{method}: the workers were given different datasets: {what} is {everyones[0][what]!r} on worker "
                    f"0, and {value!r} on worker {worker}. All workers must make the same dataset, as each reads some "
                    "of it; if each is to have one of its own, use auto_shard_policy='off' or "
                    "distribute_datasets_from_function."
                )


def _file(path: str) -> File:
    try:
        return os.path.basename(path), os.stat(path).st_size
    except OSError:
        return os.path.basename(path), None


def _difference(ours: Sequence[File], theirs: Sequence[File], worker: int) -> str:
    here, there = dict(ours), dict(theirs)
    for some, others, has, has_not in ((here, there, 0, worker), (there, here, worker, 0)):
        missing = [name for name in some if name not in others]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            return f"worker {has} has {missing[0]!r}{more}, and worker {has_not} has not"
    if len(ours) != len(theirs):  # the same names, in several directories
        return f"worker 0 has {len(ours)}, and worker {worker} has {len(theirs)}"
    if len(here) == len(ours):  # the order may depend on the directories
        for name, size in here.items():
            if there[name] != size:
                return f"{name!r} has {_size(size)} on worker 0, and {_size(there[name])} on worker {worker}"
    place, a, b = next((i, x, y) for i, (x, y) in enumerate(zip(ours, theirs, strict=True)) if x != y)
    if a[0] == b[0]:
        return f"{a[0]!r} has {_size(a[1])} on worker 0, and {_size(b[1])} on worker {worker}"
    return f"number {place} is {a[0]!r} on worker 0, and {b[0]!r} on worker {worker}"


def _size(size: int | None) -> str:
    return "no bytes that can be read" if size is None else f"{size} bytes"


def _samples(dataset: Any) -> Any:
    """Digests of some examples, if reading them only copies rows of arrays."""
    if not graph.is_in_memory(dataset):
        return None
    source = graph.source_of(graph.chain(dataset)[-1])
    numbers = sorted({int(i) for i in np.linspace(0, len(source) - 1, _SAMPLES)}) if len(source) else []
    leaves = [leaf for number in numbers for leaf in jax.tree_util.tree_leaves(source[number])]
    numeric = [np.asarray(leaf) for leaf in leaves if np.asarray(leaf).dtype.kind in "biufc"]
    return [digest(leaf)[2] for leaf in numeric]
