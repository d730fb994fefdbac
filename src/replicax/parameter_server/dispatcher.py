"""The dispatcher: assigns scheduled functions to workers, and handles their results."""

from __future__ import annotations

import contextlib
import operator
import pickle
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from replicax.errors import WorkerError
from replicax.parameter_server.actors import TIMEOUT, Actor, ActorDiedError, NoRoomError, Reply
from replicax.parameter_server.definitions import CallOutcome, FunctionCall
from replicax.parameter_server.recovery import Recovery
from replicax.parameter_server.remote_values import RemoteValue
from replicax.parameter_server.scheduled_functions import BusyWorker, Inbox, ScheduledFunction, progress
from replicax.parameter_server.server.messages import Ended
from replicax.parameter_server.work_report import WorkLog, WorkReport
from replicax.variables.slots import launching

_MOST_DEATHS = 10
_MOST_QUEUED = 4096
_PAUSE = 0.01
_LOOK = 2.0
_SECONDS_TO_START = 300.0


class Dispatcher:
    """Sends each scheduled function to a worker; and again if the worker dies."""

    def __init__(
        self,
        workers: int,
        start: Callable[[int], Actor],
        recovery: Recovery,
        groups: int,
        max_staleness: int | None,
    ) -> None:
        self._recovery = recovery
        self._since_snapshot: list[ScheduledFunction] = []
        self._has_lost_server = False
        self._is_to_assign = False  # whether to repeat the program's assignments after the functions that run again
        self._groups = groups  # the number of functions of a step
        self._max_staleness = max_staleness
        self._inbox: Inbox = queue.SimpleQueue()
        self._workers = [BusyWorker(index, start, self._inbox) for index in range(workers)]
        self._waited = 0.0  # without any worker that has started
        self._queue: list[ScheduledFunction] = []  # in the order of their numbers
        self._next = 0
        self._error: WorkerError | None = None
        self._broken_off: WorkerError | None = None  # why the present step of several functions is void
        self.closed: str | None = None  # why no function can run any more, which every later call raises
        self.lock = threading.RLock()  # held while functions are sent, during snapshots, and while servers go back
        self._changed = threading.Condition(self.lock)
        self._log = WorkLog()
        self._thread = threading.Thread(target=self._listen, name="replicax-dispatcher", daemon=True)
        self._thread.start()

    # --- called by the user -----------------------------------------------------------------------------

    def schedule(
        self, name: str, digest: str, data: bytes | Reply, arguments: bytes, uses: Sequence[Any]
    ) -> RemoteValue:
        """Schedule a :class:`ScheduledFunction`; blocks while very many are waiting.

        Raises a WorkerError if an earlier function has failed, or the coordinator is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._queue) < _MOST_QUEUED or self._error or self.closed)
            self._raise_error()
            number, self._next = self._next, self._next + 1
            call = FunctionCall(number, name, digest, arguments)
            value = RemoteValue(str(call), number, self)
            self._queue.append(ScheduledFunction(call, data, uses, value))
            self._log.since = self._log.since or time.monotonic()
            self._send()
            return value

    def join(self, timeout: float | None) -> WorkReport:
        """Wait until all functions are done; raises if one has failed, or the time has passed."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._in_flight or self.closed, timeout):
                raise TimeoutError(f"join: after {timeout:g} seconds {progress(self._workers, len(self._queue))}")
            self._raise_error()
            self._begin_step()
            log, self._log = self._log, WorkLog()
        return log.report()

    def ended(self) -> Ended:
        """The functions that have ended, unless servers go back."""
        with self._changed:
            first = [scheduled.number for scheduled in (*self._queue[:1], *self._running)]
            return Ended(self._recovery.era, min(first, default=self._next))

    def done(self) -> bool:
        """Return whether all functions are done; raises as :meth:`join` does."""
        with self._changed:
            self._raise_error()
            return not self._in_flight

    @property
    def is_idle(self) -> bool:
        """Return whether no function runs or waits, so that dead servers could be restored."""
        with self._changed:
            return not self._in_flight and self.closed is None

    def close(self, why: str) -> None:
        """Stop sending; waiting functions are cancelled."""
        self._recovery.stopped = why  # it may hold the lock
        with self._changed:
            self._give_up(why)
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(TIMEOUT)

    def settled(self, lost_in: int | None = None) -> int:
        """Return how many times servers have gone back; waits until the functions before that have run again.

        Until then the servers lack changes that the program knows of. If a call has failed in the era ``lost_in``, they
        go back first, unless they have since. The dispatcher's own thread, which runs the functions again, does not
        wait.

        Raises:
          WorkerError: recovery is impossible.
          ActorDiedError: called on the thread that has to go back, and will.
        """
        is_lost = lost_in is not None
        if threading.current_thread() is self._thread:
            if is_lost:
                raise ActorDiedError("a parameter server has died")
            return self._recovery.era
        with self._changed:
            if self._recovery.era == lost_in:
                self._has_lost_server = True
                self._send()
        released = threading.Condition(launching)  # the dispatcher's thread may need what a thread that reads holds
        with released:
            while True:
                with self._changed:
                    if is_lost:
                        self._raise_error()
                    waits = self._is_to_assign or (is_lost and self._has_lost_server)
                    if self.closed is not None or not waits:
                        return self._recovery.era
                released.wait(_PAUSE)

    def save(self) -> None:
        """Take a snapshot before the next function: the program has assigned a variable."""
        with self._changed:
            self._send()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self.closed is not None:
            raise WorkerError(self.closed)

    # --- sending ----------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Send functions to idle workers, as far as possible."""
        if self.closed is not None:
            return
        if self._is_to_assign and not any(scheduled.runs_again for scheduled in self._in_flight):
            self._assign()
        is_due = not self._is_to_assign and self._recovery.is_due(len(self._since_snapshot))
        if self._has_lost_server or is_due:
            if self._running:
                return
            self._go_back() if self._has_lost_server else self._snapshot()
            return self._send()
        for worker in self._workers:
            while worker.is_ready and worker.running is None and self._may_send():
                self._send_to(worker, self._queue.pop(0))
        self._changed.notify_all()

    @property
    def _in_flight(self) -> list[ScheduledFunction]:
        """The functions that wait or that workers have."""
        return [*self._queue, *self._running]

    @property
    def _running(self) -> list[ScheduledFunction]:
        """The functions that workers have."""
        return [worker.running for worker in self._workers if worker.running is not None]

    def _may_send(self) -> bool:
        """Return whether a function may begin now."""
        if not self._queue:
            return False
        scheduled, running = self._queue[0], self._running
        if self._is_to_assign and not any(
            other.runs_again and other.number >= scheduled.number for other in self._in_flight
        ):
            return False
        if not all(value.is_finished for value in scheduled.inputs):
            return False  # these were scheduled earlier, so they don't wait for this one
        if self._groups > 1:
            return all(other.number // self._groups == scheduled.number // self._groups for other in running)
        bound = self._max_staleness
        return bound is None or (len(running) <= bound and all(other.beside < bound for other in running))

    def _send_to(self, worker: BusyWorker, scheduled: ScheduledFunction) -> None:
        """Send a function to a worker, or cancel it if another function whose result it uses has failed."""
        try:
            inputs = {value.number: value.fetch(0) for value in scheduled.inputs}
        except WorkerError as error:
            return scheduled.cancel(error)
        others = self._running
        for other in others:
            other.beside += 1
        scheduled.beside = len(others)
        new = self._recovery.home.definitions.since(worker.definitions)
        worker.running = scheduled
        worker.call(scheduled, "work", scheduled.call, scheduled.data, new, self.ended(), inputs)

    # --- servers that die -------------------------------------------------------------------------------

    def _snapshot(self) -> None:
        """Take a snapshot, while no function is running; without functions since the last one there is no need."""
        if not self._since_snapshot:
            return self._recovery.home.begin()
        try:
            self._recovery.snapshot()
            self._since_snapshot = []
        except (ActorDiedError, TimeoutError):
            self._has_lost_server = True

    def _go_back(self) -> None:
        """Go back to the last snapshot, and schedule all functions since then again, while none is running."""
        self._put_back(self._since_snapshot)
        self._since_snapshot = []
        try:
            self._recovery.go_back()
            self._is_to_assign = True
        except ActorDiedError as error:
            self._recovery.home.lost = f"the parameter servers are lost: {error}"
            self._give_up(
                f"the parameter servers can't go on: {error}. Restore the variables from a checkpoint, with another "
                "coordinator."
            )
        self._has_lost_server = False

    def _assign(self) -> None:
        """Repeat the program's assignments, after the functions that had ended have run again."""
        try:
            self._recovery.home.servers.put(self._recovery.home.assigned)
            self._is_to_assign = False
        except (ActorDiedError, TimeoutError):
            self._has_lost_server = True

    # --- results ----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            try:
                try:
                    message = self._inbox.get(timeout=_LOOK)
                except queue.Empty:
                    self._look()
                    continue
                if message is None:
                    return
                if self.closed is not None:
                    continue
                worker, scheduled, reply = message
                if scheduled is None:
                    self._log.deaths += not worker.note(reply)
                else:
                    outcome = self._outcome(worker, scheduled, reply)
                    with self._changed:
                        worker.running = None
                        self._conclude(worker, scheduled, outcome)
                with self._changed:
                    self._send()
            except BaseException as error:  # an internal error, or one of the engine: no caller may wait for ever
                with self._changed:
                    kind = "" if isinstance(error, ActorDiedError | TimeoutError) else f"{type(error).__name__}: "
                    self._give_up(f"the coordinator can't go on: {kind}{error}")

    def _look(self) -> None:
        """Check, when no result has come for a while, whether one can still come."""
        self._recovery.check()
        self._waited = 0.0 if any(worker.is_ready for worker in self._workers) else self._waited + _LOOK
        if self._waited > _SECONDS_TO_START:
            raise TimeoutError(f"no worker has started within {_SECONDS_TO_START:g} seconds")

    def _give_up(self, why: str) -> None:
        """Stop running functions; each later call raises with this reason."""
        if self.closed is None:
            self.closed = why
        for scheduled in self._in_flight:
            scheduled.cancel(why)
        self._queue = []
        for worker in self._workers:
            worker.running = None
        self._changed.notify_all()

    def _outcome(self, worker: BusyWorker, scheduled: ScheduledFunction, reply: Reply) -> CallOutcome | None:
        """The result of a call; ``None`` if it must be repeated."""
        try:
            outcome: CallOutcome = reply.result(TIMEOUT)
        except ActorDiedError as error:
            scheduled.deaths += 1
            self._log.deaths += 1
            worker.replace()
            if scheduled.deaths < _MOST_DEATHS:
                return None
            ended = f"it has ended its worker {_MOST_DEATHS} times; the last time: {error}"
            return CallOutcome(error=WorkerError(f"{scheduled.value.name}, on worker {worker.index}: {ended}"))
        except NoRoomError as error:
            return _failed_outcome(worker, scheduled, error, str(error))
        except Exception as error:  # sending the result failed, after the function had run
            text = f"what it has returned can't be sent to the coordinator, or be read there: {error}"
            return _failed_outcome(worker, scheduled, error, text)
        if outcome.has_lost_server:
            self._has_lost_server = True
            return None
        if outcome.to_build is None:
            return outcome
        try:
            self._recovery.home.build(*outcome.to_build)
        except (ActorDiedError, TimeoutError):
            self._has_lost_server = True
        except Exception as error:
            return _failed_outcome(worker, scheduled, error, str(error))
        return None

    def _conclude(self, worker: BusyWorker, scheduled: ScheduledFunction, outcome: CallOutcome | None) -> None:
        why = self._broken_off or self._error
        if outcome is None and (why is None or scheduled.runs_again):
            self._put_back([scheduled])
            return
        if outcome is None:
            scheduled.cancel(why)
        elif outcome.error is not None:
            error = outcome.error
            if outcome.cause is not None:
                with contextlib.suppress(Exception):  # its class can't be imported here
                    error.__cause__ = pickle.loads(outcome.cause)
            scheduled.value._finish(error=error)
            if why is None:
                self._error = error
                step = scheduled.number // self._groups
                again = [other for other in self._queue if other.runs_again and other.number // self._groups != step]
                for other in self._queue:
                    other.cancel(error)
                self._queue = again
                if self._groups > 1:
                    self._broken_off = error
                    self._begin_step()
        else:
            self._since_snapshot.append(scheduled)
            if not scheduled.runs_again:
                self._recovery.tries = 0  # deaths before this don't count any more
            self._log.functions[worker.index] += 1
            self._log.staleness.update(outcome.staleness)
            scheduled.value._finish(outcome.value)
        if self._broken_off is not None and not self._running:
            self._break_off(scheduled.number // self._groups)

    def _break_off(self, step: int) -> None:
        """Void a step: one of its functions has failed, and the others have ended."""
        self._broken_off = None
        self._since_snapshot = [other for other in self._since_snapshot if other.number // self._groups != step]
        try:
            self._recovery.home.servers.break_off(Ended(self._recovery.era, step * self._groups))
        except (ActorDiedError, TimeoutError):
            self._has_lost_server = True

    def _put_back(self, functions: Sequence[ScheduledFunction]) -> None:
        """Queue functions again."""
        self._queue = sorted([*functions, *self._queue], key=operator.attrgetter("number"))

    def _begin_step(self) -> None:
        """Note that the next function is the first of a step."""
        self._next = -(-self._next // self._groups) * self._groups


def _failed_outcome(worker: BusyWorker, scheduled: ScheduledFunction, error: Exception, text: str) -> CallOutcome:
    """The outcome of a function whose arguments, result or optimizer has failed in this process."""
    worker.definitions.clear()  # the call may not have arrived
    what = f"{scheduled.value.name} failed on worker {worker.index}"
    return CallOutcome(error=WorkerError(f"{what}: {type(error).__name__}: {text}"))
