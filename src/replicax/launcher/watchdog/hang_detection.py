"""Finds the workers that hang, given the status of every worker of a machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from replicax.launcher.watchdog.worker_monitor import LONG_PATIENCE, Condition, WorkerStatus

_WITHOUT_EXCUSE = (Condition.RENDEZVOUS, Condition.UNKNOWN)


@dataclasses.dataclass(frozen=True)
class Hang:
    """Workers that hang, all for the same reason.

    Attributes:
      workers: their statuses; messages name the first.
      why: in words.
      is_certain: whether each of them is known to be at fault; otherwise all wait, and the cause is unknown.
    """

    workers: tuple[WorkerStatus, ...]
    why: str
    is_certain: bool = True


def find_hang(statuses: Sequence[WorkerStatus], timeout: float, is_alone: bool = True) -> Hang | None:
    """The workers that hang, if there are any.

    Two conditions are certain whatever others do: a stopped process, and one that no longer runs Python. In all others
    a worker may wait for another one in a way that the launcher can't see. So no worker is judged as long as another
    one makes progress or has a reason not to, unless that takes very long. A worker that computes in Python has that
    long, too: it may be in an endless loop, or do work that it has not announced.

    Args:
      statuses: of all workers that have not ended.
      timeout: for how many seconds a worker may show no progress, at least.
      is_alone: whether there are no other hosts, for whose workers these could wait.
    """
    for condition, why in (
        (Condition.STOPPED, "its process is stopped (SIGSTOP)"),
        (Condition.MUTE, "its Python does not run any more"),
    ):
        found = tuple(s for s in statuses if s.condition is condition and s.is_overdue)
        if found:
            return Hang(found, why)
    inside = [s for s in statuses if s.condition is Condition.WAITING]
    computing = tuple(s for s in statuses if s.computes >= LONG_PATIENCE * timeout)
    if computing and inside and len(computing) + len(inside) == len(statuses):
        return Hang(computing, "its Python computes, and makes no step for which the others wait")
    idle = [s for s in statuses if s.condition is Condition.IDLE and s.is_overdue]
    waiting = [s for s in inside if s.is_overdue]
    others = [s for s in statuses if s not in idle and s not in inside and s.condition not in _WITHOUT_EXCUSE]
    if idle:
        # Workers inside a program most probably wait for them, even if the duration of the program is unknown.
        gets_on = others or any(s.seconds < timeout / 2 for s in inside)
        patient = [s for s in idle if not gets_on or s.seconds >= LONG_PATIENCE * timeout]
        if patient:
            return Hang(tuple(patient), "it neither runs a step nor uses its processor")
        return None
    if not is_alone:
        waiting = [s for s in waiting if s.seconds >= LONG_PATIENCE * timeout]
    if not waiting or others or len(waiting) < len(inside):
        return None
    why = "its program does not come to its end"
    called = tuple(s for s in waiting if s.in_callback)
    if called and (len(called) < len(waiting) or len(waiting) == 1):
        return Hang(called, "its program has called Python on the host, which does not return")
    behind = min(s.launched for s in waiting)
    late = tuple(s for s in waiting if s.launched == behind)
    if len(late) < len(waiting):
        return Hang(late, f"{why}, and it is behind the others")
    return Hang(tuple(waiting), why, is_certain=len(waiting) == 1)
