"""The rendezvous of the per-replica executor's replicas: one runs at a time, until it waits in a collective.

Each replica has a thread, but only one of them runs at any moment: until it waits in a collective, or ends. Then the
next one runs. When all wait in the same collective, it is computed, and replica 0 goes on. So the order is always the
same, prints don't mix, and a deadlock is found without a clock: as soon as all replicas have stopped at different
collectives.

With several workers each has a rendezvous for its own replicas. When all of these wait or have ended, the workers
exchange the state of each replica and its contribution.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from replicax.errors import DeadlockError, users_line
from replicax.execution.signals import hold_signals
from replicax.workers.codec import declared
from replicax.workers.lockstep import Lockstep

_TRIES = 5
"""How often to ask a replica's thread to end. After that it is left behind; it is a daemon."""


class Offers(list[Any]):
    """The contributions of the replicas to a collective, in their order."""

    result: Any = None  # computed by the first of this worker's replicas, for the others


@declared
class _State(enum.Enum):
    READY = "ready"
    RUNNING = "running"
    WAITING = "waiting"
    DONE = "done"
    FAILED = "failed"


@dataclasses.dataclass
class _Replica:
    number: int
    # Gets the offers of its collective (empty at the beginning), with which it goes on; or ``None``: it must end.
    resume: queue.SimpleQueue[Offers | None] = dataclasses.field(default_factory=queue.SimpleQueue)
    state: _State = _State.READY
    collective: str = ""
    line: str = ""
    deadline: float = math.inf
    timeout: float | None = None
    offer: Any = None
    rows: tuple[int, int] | None = None
    result: Any = None
    error: BaseException | None = None


@declared
@dataclasses.dataclass(frozen=True)
class _Report:
    """The state of a replica, as sent to all workers."""

    replica: int
    place: tuple[_State, str]
    whereabouts: str
    offer: Any
    rows: tuple[int, int] | None


class Rendezvous:
    """Runs one function for each of this worker's replicas, of ``count`` in all; see the module's docstring."""

    def __init__(self, functions: Mapping[int, Callable[[], Any]], count: int, lockstep: Lockstep) -> None:
        self._replicas = [_Replica(i) for i in functions]
        self._by_number = {r.number: r for r in self._replicas}
        self.count = count
        self._lockstep = lockstep
        # Simple queues: an interrupt in the midst of a threading.Semaphore, which is written in Python, breaks it.
        self._stopped: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads = [
            # A thread drops its arguments when it ends, so they don't keep the arrays of the step alive.
            threading.Thread(target=self._thread, args=(r, fn), name=f"replica {r.number}", daemon=True)
            for r, fn in zip(self._replicas, functions.values(), strict=True)
        ]

    def run(self) -> list[Any]:
        """Run this worker's replicas to their end; return the result of each.

        Raises the error of the first replica that failed, with a note that names the replica; or a DeadlockError if
        replicas of any worker wait in a collective that others don't call.
        """
        try:
            release = hold_signals()
            try:
                for thread in self._threads:
                    thread.start()
            finally:
                release()
            for replica in self._replicas:
                self._resume(replica, Offers())
            while self._run_collective():
                pass
        except BaseException as error:
            failed = next((f"replica {r.number}" for r in self._replicas if r.error is error), "replicas")
            self._lockstep.fail(error, f"{failed} of {self.count}")
            raise
        finally:
            self._abandon()
            for replica in self._replicas:
                replica.error = None  # its traceback refers to the replica: a cycle would keep the arrays alive
        return [r.result for r in self._replicas]

    def exchange(
        self,
        number: int,  # the number of the replica
        collective: str,  # the name of the collective; the same on all replicas
        offer: Any,  # the contribution of this replica
        timeout: float | None = None,  # the most seconds to wait for the others; ``None``: no limit
        # This replica's rows and those of all replicas, if a replica without rows may leave the collective out.
        rows: tuple[int, int] | None = None,
    ) -> Offers:
        """Enter a collective as one replica, and wait for the others.

        Returns:
          The contributions of all replicas, in their order; ``None`` for one that has left the collective out.
        """
        replica = self._by_number[number]
        replica.collective, replica.offer, replica.line, replica.timeout = collective, offer, users_line(), timeout
        replica.rows = rows
        replica.deadline = math.inf if timeout is None else time.monotonic() + timeout
        replica.state = _State.WAITING
        self._stopped.put(None)
        offers = replica.resume.get()
        if offers is None:
            raise SystemExit
        replica.offer = None
        return offers

    def _thread(self, replica: _Replica, function: Callable[[], Any]) -> None:
        try:
            if replica.resume.get() is not None:
                replica.result = function()
                replica.state = _State.DONE
        except BaseException as error:
            replica.error, replica.state = error, _State.FAILED
        finally:
            self._stopped.put(None)

    def _resume(self, replica: _Replica, offers: Offers) -> None:
        """Let a replica run until it waits in a collective or ends; raise its error."""
        replica.state = _State.RUNNING
        replica.resume.put(offers)
        while True:
            try:
                self._stopped.get(timeout=self._seconds_left())
                break
            except queue.Empty:
                self._check_deadlines()
        if replica.error is not None:
            if not self._lockstep.is_known(replica.error):
                replica.error.add_note(f"(raised by replica {replica.number} of {self.count})")
            raise replica.error

    def _seconds_left(self) -> float | None:
        """The seconds that the running replica has until a waiting one reaches its deadline."""
        deadline = min((r.deadline for r in self._replicas if r.state is _State.WAITING), default=math.inf)
        return None if deadline == math.inf else max(0.0, deadline - time.monotonic())

    def _check_deadlines(self) -> None:
        if any(r.state is _State.WAITING and r.deadline < time.monotonic() for r in self._replicas):
            raise DeadlockError("a collective has timed out: " + "; ".join(map(_whereabouts, self._replicas)))

    def _run_collective(self) -> bool:
        """Let all replicas go on from the collective in which they wait; ``False`` if all have ended."""
        everyone = self._reports()
        if all(report.place[0] is _State.DONE for report in everyone):
            return False
        place = next(
            (r.place for r in everyone if _is_complete([o for o in everyone if o.place == r.place], self.count)), None
        )
        if place is None:
            places = "; ".join(report.whereabouts for report in everyone)
            raise self._lockstep.everywhere(DeadlockError(f"not all replicas reach the same collective: {places}"))
        offers = Offers(report.offer if report.place == place else None for report in everyone)
        here = {report.replica for report in everyone if report.place == place}
        for replica in self._replicas:
            if replica.number in here:
                self._resume(replica, offers)
        return True

    def _reports(self) -> list[_Report]:
        """The reports of all replicas, in their order."""
        reports = [
            _Report(
                r.number, (r.state, r.collective if r.state is _State.WAITING else ""), _whereabouts(r), r.offer, r.rows
            )
            for r in self._replicas
        ]
        if not self._lockstep.several:
            return reports
        worker = self._lockstep.workers.index
        places = "; ".join(report.whereabouts for report in reports)
        reports = [dataclasses.replace(r, whereabouts=f"{r.whereabouts} (on worker {worker})") for r in reports]
        left = self._seconds_left()
        everyone = self._lockstep.exchange("runs a step on the per-replica executor:", reports, places, left)
        return [report for theirs in everyone for report in theirs]

    def _abandon(self) -> None:
        """End the threads that still run after an error or an interrupt."""
        release = hold_signals()
        try:
            for replica, thread in zip(self._replicas, self._threads, strict=True):
                if thread.is_alive() and replica.state in (_State.READY, _State.WAITING, _State.RUNNING):
                    replica.resume.put(None)
                    if replica.state is _State.RUNNING:
                        _raise_in(thread, SystemExit)
        finally:
            release()
        for replica, thread in zip(self._replicas, self._threads, strict=True):
            for _ in range(_TRIES if thread.ident is not None else 0):
                thread.join(timeout=1)
                if not thread.is_alive():
                    break
                if replica.state is _State.RUNNING:  # Python drops errors raised in the callback of a weak reference
                    _raise_in(thread, SystemExit)


def _is_complete(here: list[_Report], replicas: int) -> bool:
    """Return whether a collective has all replicas, or all that have rows, if the others may leave it out."""
    rows = [report.rows for report in here if report.rows is not None]
    return len(here) == replicas or (len(rows) == len(here) and sum(own for own, _ in rows) == rows[0][1])


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise an exception in another thread, before its next Python operation."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(error))


def _whereabouts(replica: _Replica) -> str:
    if replica.state is _State.WAITING:
        limit = "" if replica.timeout is None else f", for at most {replica.timeout} s,"
        return f"replica {replica.number} is{limit} in {replica.collective} at {replica.line}"
    if replica.state in (_State.RUNNING, _State.READY):
        return f"replica {replica.number} has not come"
    return f"replica {replica.number} has returned"
