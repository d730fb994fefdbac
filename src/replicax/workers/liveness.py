"""Liveness: each worker reports how it ends, and a watch in each worker looks for such reports of the others.

Workers wait for each other, and a worker that has raised an error never comes. JAX's own shutdown waits for it, too,
for minutes. So a worker writes into the coordination service at once how its Python ends (``sys.excepthook``,
``atexit``), and a thread in each worker, the *watch*, looks there twice a second. A worker that waits for others, or
launches a program that needs them, then raises a :class:`replicax.errors.WorkerError` that names the worker and says
why.

Python can't wake a worker that is inside a compiled program. If the program needs workers that will not come, and does
not end either, the watch ends the process, with the same message on stderr. It never does that while all workers are
well, however long a program takes, nor where some reached the end of the program before others.

A process can't report its own death (killed, out of memory, ``os._exit``). The chief sees it at the worker's
:mod:`connection <replicax.workers.peer_death>`, and tells the others; they see the death of the chief themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import jax

from replicax import _jax
from replicax.cluster.preflight import host_to_listen_on
from replicax.errors import DeadlockError, WorkerError, described, line_of
from replicax.workers import heartbeat
from replicax.workers.heartbeat_page import Phase
from replicax.workers.launch_log import LaunchLog, RunningProgram
from replicax.workers.peer_death import PeerDeathWatch
from replicax.workers.status_board import Board, End, Problem, Recent, Service

INTERVAL = 0.5
"""Seconds between two looks of the watch, for up to 64 workers; longer for more, as one service answers all."""
PATIENCE = 3.0
"""Seconds for which a worker that is asked may take to respond."""
STUCK = 2.0
"""After how many seconds in one program a worker tells the others its name."""
GRACE = 3.0
"""For how many seconds a program may go on that needs a worker that will not come."""
SHUTDOWN_PATIENCE = 20.0
"""For how many seconds the chief, which hosts the service, waits for the others to leave after a failure."""
EXIT_PATIENCE = 5.0
"""For how many seconds the chief waits for leaving processes to end."""
END_PATIENCE = 300.0
"""For how many seconds a worker that has ended waits for the others, before JAX's own shutdown does."""
_SAID = ("Gloo", "gloo", "NCCL", "UNAVAILABLE", "onnection closed", "onnection reset", "Socket closed")


class Liveness:
    """Tracks the processes of the other workers, and reports the end of this one."""

    def __init__(self, client: Any, index: int, count: int) -> None:
        self._client = client
        self._service = Service(client, index)
        self.index, self.count = index, count
        self.launches: dict[str, LaunchLog] = {}
        self._board = Board()
        self._problem: Problem | None = None
        self._since = 0.0  # when the watch saw the problem
        self._told = self._failed = False
        self._dead: set[int] = set()
        self._answered: set[str] = set()
        self._posted_stuck: dict[str, int] = {}
        self._threads = {threading.get_ident()}
        self._numbers = itertools.count()
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._deaths: PeerDeathWatch | None = None
        self._thread = threading.Thread(target=self._watch, name="replicax-watch", daemon=True)

    def start(self) -> None:
        """Start the watch, and report the end of this process from now on."""
        self._hook = self._install()
        atexit.register(self.leave)
        host = _jax.coordinator_host()
        host = host_to_listen_on(host) if self.index == 0 else host
        self._deaths = PeerDeathWatch(self.index, host, self._service.home)
        if self._deaths.home is not None:
            self._service.post_home(self._deaths.home)
        self._thread.start()

    # --- queries --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if some workers are known not to come any more.

        Raises:
          WorkerError: one has failed; the message says why.
          DeadlockError: workers run different programs.
        """
        if self._problem is not None:
            raise self._problem.kind(self._problem.text)

    def check_launch(self, strategy: str) -> None:
        """Do the same before the launch of a program that all workers launch; also raise if one has ended."""
        ends = self._board.ends
        self.check()
        for worker, end in ends.items():
            if end.launched(strategy) <= self.launches[strategy].count:
                raise WorkerError(self._message_of_end(worker, "is about to run a step"))

    def error_of_wait(self, worker: int) -> WorkerError | DeadlockError | None:
        """Return the error of :meth:`check`, or that ``worker`` has ended."""
        ends = self._board.ends
        if self._problem is not None:
            return self._problem.kind(self._problem.text)
        return WorkerError(self._message_of_end(worker, "waits for it")) if worker in ends else None

    def elsewhere(self, strategy: str, doing: str) -> dict[int, str]:
        """A message for each worker that waits in a program of ``strategy`` that this one has not run, or failed in.

        This worker is ``doing`` what the others would have to do first, too.
        """
        launches = self.launches[strategy]
        return self._board.ahead(strategy, self.index, launches.count - (launches.failure is not None), doing)

    def takes_part(self) -> None:
        """Mark this thread as one that communicates with other workers: if it ends by an error, they are told."""
        self._threads.add(threading.get_ident())

    def explained(self, error: Exception, doing: str) -> Exception:
        """``error``, or the cause of it if it reports a lost connection to other workers."""
        text = str(error)
        if not is_of_connections(text):
            return error
        dead = self.silent()
        ends = self._board.ends
        if self._problem is not None:
            return WorkerError(f"{doing} was broken off, as {self._problem.text}")
        for worker in ends:
            return WorkerError(f"{doing} was broken off, as {self._message_of_end(worker, 'ran it')}")
        if dead:
            who = "worker " + " and ".join(map(str, dead))
            return WorkerError(
                f"{doing} was broken off: {who} of {self.count} (numbered from 0) gives no sign of life. Its process "
                "has died (killed, out of memory, a crash), or its host can't be reached; its own output says more. "
                "All workers have to be started again, from the last checkpoint. What the connection said: " + text
            )
        return WorkerError(
            f"{doing} was broken off, as a connection between workers was lost, though all {self.count} of them are "
            "alive: the network may be at fault, or the workers ran programs that don't fit together. All workers have "
            "to be started again, from the last checkpoint. What the connection said: " + text
        )

    def silent(self) -> list[int]:
        """The workers that do not respond within :data:`PATIENCE` seconds, and have not reported their end."""
        call = f"{self.index}-{next(self._numbers)}"
        deadline = time.monotonic() + PATIENCE
        silent = {0} - {self.index}  # without the service, which the chief hosts, no worker can be asked
        with contextlib.suppress(Exception):
            self._service.answer(call, self._recent())
            while True:
                board = self._look()
                silent = set(range(self.count)) - {self.index} - set(board.calls.get(call, ())) - set(board.ends)
                if not silent or self._problem is not None or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
            self._service.end_call(call)
        self._dead |= silent if self._problem is None else set()
        return sorted(silent)

    # --- reports --------------------------------------------------------------------------------------------

    def tell(self, error: BaseException) -> None:
        """Tell the others that ``error`` ends this worker; tell the user if another worker is the cause of it."""
        cause = self.explained(error, "the program") if isinstance(error, jax.errors.JaxRuntimeError) else error
        if cause is not error:  # a value was read, and the program that computes it needs that worker
            error.add_note(str(cause))
        why = f"{described(cause)} (raised at {line_of(error)})"
        if isinstance(error, KeyboardInterrupt):
            why = f"it was interrupted, at {line_of(error)}"
        because_of = self._problem.worker if self._problem is not None else None
        self._say(True, why, because_of if isinstance(cause, WorkerError | DeadlockError) else None)

    def _say(self, failed: bool, why: str, because_of: int | None = None) -> None:
        if self._told:
            return
        self._told, self._failed = True, failed
        if heartbeat.current is not None:  # before the others can know, and end because of it
            heartbeat.current.page.ended = time.monotonic()
        with contextlib.suppress(Exception):  # shutdown goes on without the service, too
            self._service.post_end(End(failed, why, because_of, self._recent()))

    def _recent(self) -> Recent:
        return {name: launches.recent() for name, launches in list(self.launches.items())}

    def _install(self) -> Any:
        """Report uncaught exceptions, except where Python goes on after them, as at a prompt."""
        of_main, of_threads = sys.excepthook, threading.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            if not _is_interactive():
                self.tell(error)
            of_main(kind, error, trace)

        def thread_hook(args: Any) -> None:
            if args.exc_value is not None and threading.get_ident() in self._threads:
                self.tell(args.exc_value)
            of_threads(args)

        sys.excepthook, threading.excepthook = hook, thread_hook
        return hook

    # --- the watch ------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        interval = INTERVAL * max(1, self.count / 64)
        while not self._stop.is_set():
            with contextlib.suppress(Exception):  # the service may be shutting down; JAX then ends this process
                self._note_deaths(interval)
                if _jax.coordination_client() is not self._client:
                    return  # jax.distributed.shutdown has been called
                if not self._stop.is_set():
                    self._look_around()

    def _note_deaths(self, seconds: float) -> None:
        """Wait for the death of a worker, for at most ``seconds``, and report it."""
        assert self._deaths is not None
        for worker, process in self._deaths.wait(seconds).items():
            if _jax.coordination_client() is not self._client:
                continue
            why = (
                f"its process has died ({process}): it was killed, ran out of memory, or crashed; its own output says "
                "more. All workers have to be started again, from the last checkpoint"
            )
            if self.index == 0:
                if worker not in self._service.read().ends:  # it did not report its end itself
                    self._service.post_end(End(True, why, None, {}), worker)
            elif self._problem is None and not self._told:
                self._since, self._problem = time.monotonic(), Problem.of_failure(worker, self.count, why)
                # JAX ends a process that has lost the service, and does not say why.
                said = f"Replicax, worker {self.index} of {self.count}: {self._problem.text}"
                print(said, file=sys.stderr, flush=True)

    def _look_around(self) -> None:
        board = self._look()
        for call, workers in board.calls.items():
            if self.index not in workers and call not in self._answered:
                self._answered.add(call)
                self._service.answer(call, self._recent())
        now = time.monotonic()
        running = {name: (launches.running_since(), launches) for name, launches in list(self.launches.items())}
        stuck = {n: r for n, (t, x) in running.items() if t is not None and now - t > STUCK and (r := x.running())}
        counts = {name: program.count for name, program in stuck.items()}
        if counts != self._posted_stuck:
            self._posted_stuck = counts
            self._service.post_stuck(stuck)
        for name, program in stuck.items():
            why = self._problem.text if self._problem is not None else self._left_alone(name, program)
            since = max(self._since, running[name][0] or now)
            if why is not None and program.communicates and now - since > GRACE:
                self._end_by_force(self.launches[name], f"{program.name!r} can't come to its end, as {why}")

    def _look(self) -> Board:
        """Read the board, and note the problem that it shows.

        Note the problem before the board: a thread that finds an end on the board then finds the cause, too.
        """
        board = self._service.read()
        if self._problem is None:
            found = board.problem(self.index, self.count, self._recent())
            if found is not None:
                self._since, self._problem = time.monotonic(), found  # in this order, for the watch
        if board.ends and not self._board.ends:
            self._since = time.monotonic()
        self._board = board
        return board

    def _left_alone(self, strategy: str, program: RunningProgram) -> str | None:
        gone = (worker for worker, end in self._board.ends.items() if end.launched(strategy) < program.count)
        return next((self._message_of_end(worker, f"runs {program.name!r}") for worker in gone), None)

    def _message_of_end(self, worker: int, doing: str) -> str:
        return (
            f"worker {worker} of {self.count} (numbered from 0) has ended its program, by its last line or sys.exit, "
            f"while worker {self.index} {doing}. All workers must run the same program to its end."
        )

    def _end_by_force(self, launches: LaunchLog, why: str) -> None:
        """End this process, whose Python waits inside a program, unless the program ends now that others have left."""
        self._say(True, why, None if self._problem is None else self._problem.worker)
        with contextlib.suppress(Exception):
            self._depart()
        if launches.running_since() is None:
            return
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        print(
            f"Replicax ends worker {self.index} of {self.count}, as it is inside a compiled program, and can't raise "
            f"an error: {why}\nIt is here (most recent call last):\n{stack}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    # --- shutdown -------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Find out, at the end of the process, whether the others come, before JAX waits for them."""
        if os.getpid() != self._pid:  # a forked child's end is not the worker's
            return
        heartbeat.switch(Phase.RENDEZVOUS)
        self._stop.set()
        if self._deaths is not None:
            self._deaths.wake()
        self._thread.join(5.0)
        if _jax.coordination_client() is not self._client:
            return
        uncaught = getattr(sys, "last_value", None)
        if sys.excepthook is not self._hook and uncaught is not None and not _is_interactive():
            self.tell(uncaught)  # another library's hook has handled it
        failure = next((why for log in list(self.launches.values()) if (why := log.failure) is not None), None)
        self._say(failure is not None, f"{failure}; it has ended after that" if failure else "")
        try:
            if not self._failed and self._all_end():
                return
            is_stuck = any(launches.keeps_devices() for launches in list(self.launches.values()))
            self._depart()
            if is_stuck:  # the program can't be stopped, and JAX would wait for it
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)
        except KeyboardInterrupt:
            pass
        except Exception:  # the service can't be reached; JAX's own shutdown reports that
            return
        _jax.abandon_coordination()

    def _all_end(self) -> bool:
        """Return whether all others reach their end, too, and none by an error."""
        for _ in _looking(END_PATIENCE):
            if self.index == 0:
                self._note_deaths(0.0)  # the watch has ended
            board = self._look()
            if board.gone or self._problem is not None:
                return False
            if len(board.ends) == self.count - 1:
                return True
        return True

    def _depart(self) -> None:
        """Announce that this process leaves without waiting. The chief leaves last: JAX ends workers that lose it."""
        assert self._deaths is not None
        if self.index:
            self._deaths.leave_open()
            self._service.post_gone()
            return
        others = set(range(1, self.count))
        for _ in _looking(SHUTDOWN_PATIENCE):
            self._deaths.wait(0.0)
            if others <= self._look().gone | self._dead | self._deaths.ended:
                break
        for _ in _looking(EXIT_PATIENCE):
            self._deaths.wait(0.0)
            if others <= self._deaths.ended:
                return


def is_of_connections(text: str) -> bool:
    """Return whether the text of an error reports a lost connection between workers.

    >>> is_of_connections("INTERNAL: Gloo all-reduce failed: Connection reset by peer"), is_of_connections("a NaN")
    (True, False)
    """
    return any(word in text for word in _SAID)


def _looking(seconds: float) -> Iterator[None]:
    """Yield now and then, for ``seconds``."""
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        yield
        time.sleep(min(0.25, 0.02 + 0.1 * (time.monotonic() - start)))


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


_of_clients: list[tuple[Any, Liveness]] = []


def liveness_of(client: Any, index: int, count: int) -> Liveness:
    """The liveness of the workers that ``client`` connects: one object in each process."""
    for known, liveness in _of_clients:
        if known is client:
            return liveness
    liveness = Liveness(client, index, count)
    _of_clients.append((client, liveness))
    liveness.start()
    return liveness
