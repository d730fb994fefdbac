"""Finds out which workers share a disk, because a user's option might be wrong.

Each worker creates a file in the folder of the checkpoint, and looks for the files of the others there.
"""

from __future__ import annotations

import contextlib
import os
import uuid

from replicax.workers.lockstep import Lockstep

Groups = tuple[tuple[int, ...], ...]
"""The workers that share a disk, for each disk; the first worker of a group writes what a disk needs once."""


def groups_sharing(folder: str, lockstep: Lockstep) -> Groups:
    """The groups of workers that see the same files in ``folder``, which must exist on all of them."""
    if not lockstep.several:
        return ((0,),)
    own_file = f".replicax-{uuid.uuid4().hex}"
    path = os.path.join(folder, own_file)
    try:
        with lockstep.failing_together("looking for shared disks"), open(path, "w", encoding="utf-8") as file:
            file.write("Replicax looks whether workers share this disk. This file can be deleted.\n")
        names = lockstep.exchange("looks for shared disks", own_file)
        seen = [os.path.exists(os.path.join(folder, name)) for name in names]
        return _connected(lockstep.exchange("shares disks", seen))
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _connected(seen: list[list[bool]]) -> Groups:
    """The groups, from which worker sees whose file.

    >>> _connected([[True, False, True], [False, True, False], [False, False, True]])
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
