"""Functions of a worker, one after the other, and what is got for the next one in the meantime."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from replicax.parameter_server.engine.actors import TIMEOUT

Found = TypeVar("Found")
Result = TypeVar("Result")


class Ahead(Generic[Found]):
    """Something that is got before a turn, if there is time, and is not begun any more when the turn has come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_come = threading.Event()
        self._found: Found | None = None

    def get(self, get: Callable[[], Found], wait: float) -> None:
        """Get it after this many seconds, unless the turn has come by then."""
        if self._has_come.wait(max(0.0, wait)):
            return
        with self._lock:
            if not self._has_come.is_set():
                self._found = get()

    def take(self) -> Found | None:
        """The turn has come: what has been got, which may be about to come; ``None`` if nothing was begun."""
        self._has_come.set()
        with self._lock:
            return self._found


class Turns:
    """A thread on which functions run, in the order of their places.

    Attributes:
      began: when the present turn began, in the seconds of ``time.monotonic``; ``None`` between turns.
    """

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="replicax-functions")
        self._changed = threading.Condition()
        self._next = 0
        self.began: float | None = None

    def queue(self, place: int, run: Callable[[], Result]) -> concurrent.futures.Future[Result]:
        """Have ``run`` called, after what has the places before: 0, 1, 2 and so on."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._next == place, TIMEOUT):
                raise TimeoutError(f"call {place} has come, and {self._next} has not within {TIMEOUT:g} seconds")
            self._next += 1
            self._changed.notify_all()
            return self._thread.submit(self._turn, run)

    def _turn(self, run: Callable[[], Result]) -> Result:
        self.began = time.monotonic()
        try:
            return run()
        finally:
            self.began = None
