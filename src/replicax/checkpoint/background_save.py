"""A thread that writes checkpoints while training continues."""

from __future__ import annotations

import atexit
import functools
import logging
import queue
import threading
import weakref
from collections.abc import Callable

log = logging.getLogger("replicax")

Write = Callable[[Callable[[], bool]], None]
"""Writes a checkpoint; its argument is a function that returns whether to give up, at the end of the program."""

SHUTDOWN_PATIENCE = 20.0
"""For how many seconds the end of the program waits for a save that needs other workers, which may be gone."""


class BackgroundSave:
    """Runs at most one save at a time; the next call of any method raises its error. The end of the program waits."""

    def __init__(self) -> None:
        self._gives_up = threading.Event()
        self._last = _Job(False, self._gives_up)
        self._last.is_over.set()
        self._jobs: queue.SimpleQueue[_Job | None] | None = None

    def begin(self, copy: Callable[[], Write], needs_others: bool) -> None:
        """Copy at once, and write in the background what ``copy`` returns; waits for the previous save first."""
        self.wait()
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            # A daemon: if other workers are gone, Python's own shutdown would wait for ever. It starts before the first
            # copy and stays, because starting a thread waits until it runs.
            threading.Thread(target=_carry_out, args=(self._jobs,), name="replicax-checkpoint", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None).atexit = False
        job = _Job(needs_others, self._gives_up)
        job.write = copy()
        self._last = job
        try:
            _unfinished.add(job)
            _wait_at_exit()
        finally:
            self._jobs.put(job)

    def check(self) -> None:
        """Raise the error of a save that is over, as :meth:`wait` does."""
        if self._last.is_over.is_set():
            self.wait()

    def wait(self) -> None:
        """Wait for the current save; raises a CheckpointError, once, if the last one has failed."""
        self._last.is_over.wait()
        error, self._last.error = self._last.error, None
        if error is not None:
            _unfinished.discard(self._last)
            raise error


class _Job:
    """A save, and its error."""

    def __init__(self, needs_others: bool, gives_up: threading.Event) -> None:
        self.write: Write | None = None
        self.needs_others = needs_others
        self.error: BaseException | None = None
        # Not Thread.join: after an interrupt there Python 3.11 takes the thread for ended.
        self.is_over = threading.Event()
        self._gives_up = gives_up

    def carry_out(self) -> None:
        write, self.write = self.write, None
        try:
            if write is not None:
                write(self._gives_up.is_set)
        except BaseException as error:
            self.error = error
        finally:
            del write  # with the memory of its copies, which the next save reuses
            self.is_over.set()
            if self.error is None:
                _unfinished.discard(self)

    def at_exit(self) -> None:
        """Wait for the save at the end of the program."""
        if not self.is_over.wait(SHUTDOWN_PATIENCE if self.needs_others else None):
            self._gives_up.set()
            self.is_over.wait(1.0)
        if self.error is not None:
            log.error("%s", self.error)  # no caller is left to raise it to


def _carry_out(jobs: queue.SimpleQueue[_Job | None]) -> None:
    """Run saves one after the other, until the :class:`BackgroundSave` is gone."""
    while (job := jobs.get()) is not None:
        job.carry_out()
        del job


_unfinished: set[_Job] = set()
"""Saves of this process that are still running, or whose error has not been raised yet."""


def wait_for_all() -> None:
    """Wait for all saves of this process; their own callers get the errors."""
    for job in list(_unfinished):
        job.is_over.wait()


@functools.cache
def _wait_at_exit() -> None:
    """Register the wait; exit handlers that are registered earlier, such as the end of the workers, run after it."""
    atexit.register(_at_exit)


def _at_exit() -> None:
    for job in list(_unfinished):
        job.at_exit()
