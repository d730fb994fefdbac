"""Announcements: what workers tell each other about an element before they use it, and the checks that they agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from replicax.data.batches.rows import BatchRows, Leaf
from replicax.workers.codec import declared, dumps


@declared
@dataclasses.dataclass(frozen=True)
class Announcement:
    """One worker's announcement of its part of an element."""

    sizes: tuple[int, ...] = ()
    kinds: tuple[tuple[Leaf, ...], ...] = ()
    """The kinds of each replica's rows; only one if they are the same; empty if this worker never had any rows."""
    is_over: bool = True
    skeleton: Any = None
    """The structure with numbers as leaves; only in the first element, and ``None`` if there is none, or if it contains
    classes that can't be sent."""
    described: str = ""
    """A description of the structure with dtypes and ranks; only in the first element."""
    error: str | None = None

    def kinds_of_replicas(self, otherwise: tuple[Leaf, ...]) -> Sequence[tuple[Leaf, ...]]:
        """The kinds of each replica's rows; ``otherwise`` if this worker never had any."""
        return self.kinds if len(self.kinds) > 1 else (self.kinds or (otherwise,)) * len(self.sizes)

    @classmethod
    def of_error(cls, error: Exception) -> Announcement:
        """The announcement that this worker could not read its part."""
        notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()) if note.startswith("(raised "))
        return cls(error=f"{type(error).__name__}: {error}{notes}")

    def with_structure(self, tree: Any, rows: BatchRows) -> Announcement:
        """Return this announcement with the structure of the rows."""
        names = [f"{np.dtype(leaf.dtype).name} of rank {leaf.ndim}" for leaf in rows.leaves]
        described = str(jax.tree_util.tree_unflatten(tree, names))
        skeleton = jax.tree_util.tree_unflatten(tree, range(tree.num_leaves))
        try:
            dumps(skeleton)
        except TypeError:
            skeleton = None
        return dataclasses.replace(self, skeleton=skeleton, described=described)


def check_read(announcements: Sequence[Announcement], where: str) -> None:
    """Raise a RuntimeError, which names the worker and its error, unless all workers have read their part."""
    for worker, other in enumerate(announcements):
        if other.error is not None:
            raise RuntimeError(f"worker {worker} could not read {where}: {other.error}")


def check_same_batch(announcements: Sequence[Announcement], where: str) -> None:
    """Raise unless all workers have the same batch, each taking its own rows of it."""
    first = announcements[0]
    for worker, other in enumerate(announcements):
        what = None
        if other.is_over != first.is_over:
            ended, on = (worker, 0) if other.is_over else (0, worker)
            what = f"the pass ends before {where} on worker {ended}, but not on worker {on}"
        elif other.sizes != first.sizes:
            what = f"{where} has {sum(first.sizes)} rows on worker 0, and {sum(other.sizes)} on worker {worker}"
        if what is not None:
            raise ValueError(
                f"{what}. Under auto_shard_policy='data' all workers go through the same batches, and each takes "
                "its own rows: they must be given the same dataset. If each is to have one of its own, use 'off'."
            )
        if other.kinds != first.kinds:
            raise TypeError(
                f"{where} has other shapes or dtypes on some workers: worker 0 has {in_words(first.kinds)}, worker "
                f"{worker} has {in_words(other.kinds)}"
            )


def check_same_structure(announcements: Sequence[Announcement], where: str) -> None:
    """Raise unless all workers' first elements have one structure; each worker checks later ones against its first."""
    described = {worker: other.described for worker, other in enumerate(announcements) if other.kinds}
    if len(set(described.values())) > 1:
        raise TypeError(
            f"{where} has other structures, dtypes or ranks on some workers than on others: "
            + "; ".join(f"worker {worker} has {description}" for worker, description in described.items())
        )


def structure_of_others(announcements: Sequence[Announcement], where: str) -> tuple[Any, tuple[Leaf, ...]]:
    """The structure and kinds of another worker's rows, for a worker that never had any."""
    worker, other = next((i, worker) for i, worker in enumerate(announcements) if worker.kinds)
    if other.skeleton is None:
        raise TypeError(
            f"this worker has nothing for {where}, and worker {worker} has {other.described}, of which it can't make "
            "an empty one, as classes of your own don't travel: make elements of dicts, lists, tuples and named tuples"
        )
    return jax.tree_util.tree_structure(other.skeleton), other.kinds[0]


def in_words(kinds: Sequence[Sequence[Leaf]]) -> str:
    """Describe rows."""
    different = dict.fromkeys(map(tuple, kinds))
    several = (", ".join(f"{np.dtype(dtype).name}{list(shape)}" for shape, dtype in leaves) for leaves in different)
    return " and ".join(several)
