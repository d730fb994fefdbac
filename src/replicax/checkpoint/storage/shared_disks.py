"""Which workers write to one disk: found by looking, as no option could be trusted to be right.

Each worker puts a file of its own where the checkpoint is to be, and looks whose files it sees there.
"""

from __future__ import annotations

import contextlib
import os
import uuid

from replicax.workers.lockstep import Lockstep

Groups = tuple[tuple[int, ...], ...]
"""The workers that share a disk, for each disk; the first worker of a group writes what is needed once on a disk."""


def groups_sharing(folder: str, lockstep: Lockstep) -> Groups:
    """The groups of workers that have the same files in ``folder``, which must exist on all of them."""
    if not lockstep.several:
        return ((0,),)
    mine = f".replicax-{uuid.uuid4().hex}"
    path = os.path.join(folder, mine)
    failure = None
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write("Replicax looks whether workers share this disk. This file can be deleted.\n")
    except OSError as error:
        failure = error
    try:
        told = lockstep.share("looks for shared disks", (mine, None if failure is None else str(failure)))
        for worker, (_, problem) in enumerate(told):
            if problem is not None:
                raise lockstep.everywhere(OSError(f"worker {worker} can't write into its folder: {problem}"))
        seen = [os.path.exists(os.path.join(folder, name)) for name, _ in told]
        return _connected(lockstep.share("shares disks", seen))
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _connected(seen: list[list[bool]]) -> Groups:
    """Groups from who sees whom.

    >>> from replicax.checkpoint.storage.shared_disks import _connected
    >>> _connected([[True, False, True], [False, True, False], [True, False, True]])
    ((0, 2), (1,))
    """
    groups: list[set[int]] = []
    for worker, others in enumerate(seen):
        group = {worker, *(other for other, sees in enumerate(others) if sees)}
        for known in [g for g in groups if g & group]:
            groups.remove(known)
            group |= known
        groups.append(group)
    return tuple(sorted(tuple(sorted(group)) for group in groups))
