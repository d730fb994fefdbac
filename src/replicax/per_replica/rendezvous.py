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
    """The contributions of the replicas to a collective, in their order.

    Attributes:
      result: computed by the first of this worker's replicas, for the others.
    """

    result: Any = None


@dataclasses.dataclass
class _Player:
    replica: int
    turn: queue.SimpleQueue[None] = dataclasses.field(default_factory=queue.SimpleQueue)
    state: str = "ready"  # ready, playing, waiting, done, failed
    meeting: str = ""
    line: str = ""
    deadline: float = math.inf
    timeout: float | None = None
    offer: Any = None
    answer: Any = None
    abandoned: bool = False
    result: Any = None
    error: BaseException | None = None


@declared
@dataclasses.dataclass(frozen=True)
class _Report:
    """The state of a replica, as sent to all workers."""

    replica: int
    place: tuple[str, str]
    whereabouts: str
    offer: Any


class Rendezvous:
    """Runs one function for each of this worker's replicas; see the module's docstring.

    Args:
      plays: the function of each replica, by its number.
      count: the number of replicas of all workers.
      lockstep: the exchange with the other workers.
    """

    def __init__(self, plays: Mapping[int, Callable[[], Any]], count: int, lockstep: Lockstep) -> None:
        self._players = [_Player(i) for i in plays]
        self._by_number = {p.replica: p for p in self._players}
        self.count = count
        self._lockstep = lockstep
        # Simple queues: an interrupt in the midst of a threading.Semaphore, which is written in Python, breaks it.
        self._back: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads = [
            # A thread drops its arguments when it ends, so they don't keep the arrays of the step alive.
            threading.Thread(target=self._thread, args=(p, plays[p.replica]), name=f"replica {p.replica}", daemon=True)
            for p in self._players
        ]

    def run(self) -> list[Any]:
        """Run this worker's replicas to their end.

        Returns:
          The result of each.

        Raises:
          DeadlockError: replicas of any worker wait in a collective that others don't call.
          Exception: the error of the first replica that failed, with a note that names the replica.
        """
        try:
            release = hold_signals()
            try:
                for thread in self._threads:
                    thread.start()
            finally:
                release()
            for player in self._players:
                self._give_turn(player)
            while self._hold_meeting():
                pass
        except BaseException as error:
            failed = next((f"replica {p.replica}" for p in self._players if p.error is error), "replicas")
            self._lockstep.fail(error, f"{failed} of {self.count}")
            raise
        finally:
            self._abandon()
            for player in self._players:
                player.error = None  # its traceback refers to the player: a cycle would keep the arrays alive
        return [p.result for p in self._players]

    def meet(self, replica: int, meeting: str, offer: Any, timeout: float | None = None) -> Offers:
        """Enter a collective as one replica, and wait for the others.

        Args:
          replica: the number of the replica.
          meeting: the name of the collective; the same on all replicas.
          offer: the contribution of this replica.
          timeout: the most seconds to wait for the others; ``None``: no limit.

        Returns:
          The contributions of all replicas, in their order.
        """
        player = self._by_number[replica]
        player.meeting, player.offer, player.line, player.timeout = meeting, offer, users_line(), timeout
        player.deadline = math.inf if timeout is None else time.monotonic() + timeout
        player.state = "waiting"
        self._back.put(None)
        player.turn.get()
        if player.abandoned:
            raise SystemExit
        answer: Offers = player.answer
        player.answer = player.offer = None
        return answer

    def _thread(self, player: _Player, play: Callable[[], Any]) -> None:
        player.turn.get()
        try:
            if not player.abandoned:
                player.result = play()
                player.state = "done"
        except BaseException as error:
            player.error, player.state = error, "failed"
        finally:
            self._back.put(None)

    def _give_turn(self, player: _Player) -> None:
        player.state = "playing"
        player.turn.put(None)
        while True:
            try:
                self._back.get(timeout=self._patience())
                break
            except queue.Empty:
                self._check_deadlines()
        if player.error is not None:
            if not self._lockstep.is_known(player.error):
                player.error.add_note(f"(raised by replica {player.replica} of {self.count})")
            raise player.error

    def _patience(self) -> float | None:
        """The seconds that the running replica has until a waiting one reaches its deadline."""
        deadline = min((p.deadline for p in self._players if p.state == "waiting"), default=math.inf)
        return None if deadline == math.inf else max(0.0, deadline - time.monotonic())

    def _check_deadlines(self) -> None:
        if any(p.state == "waiting" and p.deadline < time.monotonic() for p in self._players):
            raise DeadlockError("a collective has timed out: " + "; ".join(map(_whereabouts, self._players)))

    def _hold_meeting(self) -> bool:
        """Let all replicas go on from the collective in which they wait; ``False`` if all have ended."""
        everyone = self._reports()
        if all(report.place[0] == "done" for report in everyone):
            return False
        if len({report.place for report in everyone}) > 1:
            places = "; ".join(report.whereabouts for report in everyone)
            raise self._lockstep.everywhere(DeadlockError(f"the replicas do not meet: {places}"))
        offers = Offers(report.offer for report in everyone)
        for player in self._players:
            player.answer = offers
        for player in self._players:
            self._give_turn(player)
        return True

    def _reports(self) -> list[_Report]:
        """The reports of all replicas, in their order."""
        here = [
            _Report(p.replica, (p.state, p.meeting if p.state == "waiting" else ""), _whereabouts(p), p.offer)
            for p in self._players
        ]
        if not self._lockstep.several:
            return here
        worker = self._lockstep.workers.index
        mine = [dataclasses.replace(r, whereabouts=f"{r.whereabouts} (on worker {worker})") for r in here]
        places = "; ".join(report.whereabouts for report in here)
        everyone = self._lockstep.exchange("runs a step on the per-replica executor:", mine, places, self._patience())
        return [report for theirs in everyone for report in theirs]

    def _abandon(self) -> None:
        """End the threads that still run after an error or an interrupt."""
        release = hold_signals()
        try:
            for player, thread in zip(self._players, self._threads, strict=True):
                if thread.is_alive() and player.state in ("ready", "waiting", "playing"):
                    player.abandoned = True
                    player.turn.put(None)
                    if player.state == "playing":
                        _raise_in(thread, SystemExit)
        finally:
            release()
        for player, thread in zip(self._players, self._threads, strict=True):
            for _ in range(_TRIES if thread.ident is not None else 0):
                thread.join(timeout=1)
                if not thread.is_alive():
                    break
                if player.state == "playing":  # Python drops errors raised in the callback of a weak reference
                    _raise_in(thread, SystemExit)


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise an exception in another thread, before its next Python operation."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(error))


def _whereabouts(player: _Player) -> str:
    if player.state == "waiting":
        patience = "" if player.timeout is None else f", for at most {player.timeout} s,"
        return f"replica {player.replica} is{patience} in {player.meeting} at {player.line}"
    if player.state in ("playing", "ready"):
        return f"replica {player.replica} has not come"
    return f"replica {player.replica} has returned"
