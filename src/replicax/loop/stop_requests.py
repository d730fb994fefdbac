"""Stop requests: a request to one worker, such as a signal, ends the run on all workers at the same step.

A request is Ctrl-C, SIGTERM, a stop file, or ``run.stop(why)``. Workers run ahead of their devices and of each other,
and wait for each other inside programs. So none may just stop, and none can ask the others in every step. Instead, each
has a thread that looks into the coordination service a few times a second. When there is a request, it posts how many
calls its worker has begun, its *limit*, whatever that worker is doing: compiling, waiting in a program, or for its
input. The largest limit is the last call of all. No worker has passed it, and each goes on until it has reached it, so
no program waits for a worker that has stopped.

``jax.experimental.multihost_utils.reached_preemption_sync_point`` works alike, but for SIGTERM only. JAX catches that
signal as soon as ``jax.distributed.initialize`` has been called, and writes a notice into the service, also while
Python waits for a compiler. That notice is a request, also one that came before the run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from replicax import _jax
from replicax.errors import DeadlockError
from replicax.workers import heartbeat
from replicax.workers.heartbeat_page import Phase
from replicax.workers.lockstep import Lockstep

INTERVAL = 0.2
"""Seconds between two looks of the thread, for up to 64 workers; more for more, as one service answers all."""
PATIENCE = 60.0
"""For how many seconds a worker waits for the limits of the others."""

INTERRUPTED = "Ctrl-C"
PREEMPTED = "SIGTERM"
SIGNALS = (INTERRUPTED, PREEMPTED)

_runs = itertools.count()


class RunStops(BaseException):  # no error: nothing that deals with errors may take it for one
    """The run ends before the next call; the argument says why."""


class StopRequests:
    """The requests to end one run; a context manager, which takes over Ctrl-C and SIGTERM while it is entered."""

    def __init__(self, lockstep: Lockstep, stop_file: pathlib.Path | None = None) -> None:
        # Why the run is to end: a signal to this worker; the first of all other requests.
        self._signal: str | None = None
        self._other: str | None = None
        self._lockstep = lockstep
        self._workers = lockstep.workers
        self._file = stop_file
        self._handlers: dict[int, Any] = {}
        self._calls = 0
        self._limit: int | None = None
        self._last: int | None = None
        self._missing: list[int] = []
        self._agreed = threading.Event()
        self._over = threading.Event()
        self._wake = threading.Event()
        self._looking, self._counting = threading.Lock(), threading.Lock()
        self._client: Any = _jax.coordination_client() if lockstep.several else None
        self._keys = f"replicax/stop/{next(_runs) if lockstep.several else 'alone'}"
        self._interrupts = 0
        self._thread: threading.Thread | None = None

    def __enter__(self) -> StopRequests:
        if self._client is not None or self._file is not None:
            self._look()
        if threading.current_thread() is threading.main_thread():
            self._take_over(signal.SIGINT, self._on_interrupt)
            # Where JAX has a handler that tells all workers, also while Python can't run one, that one is better.
            if self._client is None or not _jax.catches_sigterm():
                self._take_over(signal.SIGTERM, self._on_sigterm)
        if self._client is not None or self._file is not None:
            thread = threading.Thread(target=self._watch, name="replicax-stop", daemon=True)
            try:
                thread.start()
            except BaseException:
                self.__exit__()
                raise
            self._thread = thread
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._over.set()
            self._wake.set()
            if self._thread is not None:
                self._thread.join(5.0)
            self._close()
        finally:  # also after one more Ctrl-C; its handler, the first, is put back last, as it may come again
            for number in reversed(self._handlers):
                signal.signal(number, self._handlers[number])

    @property
    def why(self) -> str | None:
        """The request that counts most of those that this worker knows of, in words; ``None`` if there is none."""
        return self._signal or self._other

    @property
    def own_signal(self) -> str | None:
        """The signal to this worker that counts most; ``None`` if there was none."""
        return self._signal

    def request(self, why: str) -> None:
        """End the run."""
        self._other = self._other or why
        self._wake.set()

    def check_wait(self) -> None:
        """Raise, while this worker waits for the input of its next call, if it need not wait for it.

        Raises:
          RunStops: no worker makes that call.
          WorkerError: another worker has failed.
        """
        is_last = self._last is not None and self._calls >= self._last
        if is_last or (self._client is None and self.why is not None):
            raise RunStops(self.why)
        self._lockstep.check()

    def begin_call(self) -> None:
        """Begin the next call that all workers make together.

        Raises:
          RunStops: they don't make it.
          DeadlockError: a request was made, and workers don't answer; names them.
          WorkerError: another worker has failed.
        """
        if self._client is None:
            self.check_wait()
            return
        with self._counting:
            is_counted = self._limit is None or self._calls < self._limit
            self._calls += is_counted
        if not is_counted:
            if self._calls >= self._wait():
                raise RunStops(self.why)
            self._calls += 1

    def agree(self) -> str | None:
        """Agree with all workers, which call this together: why the run ends if one has a request, else ``None``.

        For where all have come to the same place anyhow, as after an evaluation; the run ends there, at once. All get
        the same answer: of several requests a signal counts most.
        """
        reasons = [why for why in self._lockstep.exchange("asks whether the run goes on", self.why) if why is not None]
        return min(reasons, key=lambda why: {PREEMPTED: 0, INTERRUPTED: 1}.get(why, 2), default=None)

    def forget(self) -> None:
        """Forget the requests so far, and the stop file, but no signal.

        All workers call it together: for the calls that the end of a run makes, also of one that ends on request.
        """
        self.agree()  # until all have come here, one may be waiting for the limits of the others
        with self._looking:
            self._other = self._file = self._limit = self._last = None
            self._agreed.clear()
            self._keys += "/end"

    # --- signals --------------------------------------------------------------------------------------------

    def _take_over(self, number: int, handler: Callable[[int, Any], None]) -> None:
        before = signal.getsignal(number)
        signal.signal(number, handler)
        self._handlers[number] = signal.SIG_DFL if before is None else before

    def _on_interrupt(self, number: int, frame: Any) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            raise KeyboardInterrupt
        self._signal = self._signal or INTERRUPTED
        self._wake.set()
        _say("Ctrl-C: the step ends, and then all is saved, if there are checkpoints. Once more ends at once, unsaved.")

    def _on_sigterm(self, number: int, frame: Any) -> None:
        if self._signal != PREEMPTED:
            self._signal = PREEMPTED  # it does not wait for another end of the run
            self._wake.set()
            _say("SIGTERM: the step ends, and then all is saved, if there are checkpoints.")

    # --- the thread -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        interval = INTERVAL * max(1, self._workers.count / 64)
        while not self._over.is_set():
            self._wake.wait(interval)
            self._wake.clear()
            with contextlib.suppress(Exception), self._looking:  # the service may be going: the run finds that out
                self._look()

    def _look(self) -> None:
        if self._file is not None and self.why is None and self._file.exists():
            self._other = f"the file {self._file} is there"
        if self._client is None:
            return
        entries: list[tuple[str, bytes]] = self._client.key_value_dir_get_bytes(self._keys)
        posted = {key.removeprefix(f"{self._keys}/"): value for key, value in entries}
        if self.why is None:
            requests = sorted(key for key in posted if key.startswith("request/"))
            if requests:
                self._other = posted[requests[0]].decode()
            elif _jax.preemption_notice(self._client):
                self._other = PREEMPTED
        if self.why is None:
            return
        if self._limit is None:
            self._post(f"request/{self._workers.index}", self.why)
            with self._counting:
                self._limit = self._calls
        if f"limit/{self._workers.index}" not in posted:  # until the service has it
            self._post(f"limit/{self._workers.index}", str(self._limit))
        limits = {int(key.split("/")[1]): int(value) for key, value in posted.items() if key.startswith("limit/")}
        limits[self._workers.index] = self._limit
        self._missing = [worker for worker in range(self._workers.count) if worker not in limits]
        if self._missing:
            self._wake.wait(0.01)
            self._wake.set()  # they will come soon
        else:
            self._last = max(limits.values())
            self._agreed.set()

    @heartbeat.phase(Phase.RENDEZVOUS)
    def _wait(self) -> int:
        deadline = time.monotonic() + PATIENCE
        while not self._agreed.wait(0.05):
            self._lockstep.check()
            if time.monotonic() > deadline:
                who = ", ".join(f"worker {w}" for w in self._missing) or "the coordination service"
                raise DeadlockError(
                    f"the run is to end ({self.why}), and worker {self._workers.index} has waited {PATIENCE:g} s for "
                    f"{who} of {self._workers.count}, to agree on the last step, without an answer. Its process may "
                    "have died, or hang."
                )
        assert self._last is not None
        return self._last

    def _close(self) -> None:
        """Tell the others that this worker makes no more calls, so that they don't wait for its limit."""
        if self._client is not None and self._limit is None:
            with contextlib.suppress(Exception):
                self._limit = self._calls
                self._post(f"limit/{self._workers.index}", str(self._limit))

    def _post(self, name: str, value: str) -> None:
        self._client.key_value_set_bytes(f"{self._keys}/{name}", value.encode(), allow_overwrite=True)


def _say(line: str) -> None:
    """Print a line from a signal handler, where a stream may be in the middle of a write."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{line}\n".encode())
