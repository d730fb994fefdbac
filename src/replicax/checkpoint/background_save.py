"""The thread that writes a checkpoint while training goes on."""

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
"""Writes a checkpoint; it is given a function that says whether the program is at its end and waits no longer."""

FAREWELL = 20.0
"""For how many seconds the end of the program waits for a save that needs other workers, who may be gone."""


class BackgroundSave:
    """At most one save that is going on, and what came of the last.

    A save that has failed raises its error at the next call of anything here. A program that comes to its end waits
    until its checkpoint is written.
    """

    def __init__(self) -> None:
        self._gives_up = threading.Event()
        self._last = _Job(False, self._gives_up)
        self._last.is_over.set()
        self._jobs: queue.SimpleQueue[_Job | None] | None = None

    def begin(self, copy: Callable[[], Write], needs_others: bool) -> None:
        """Copy at once, and write in the background; waits for the save before.

        Args:
          copy: copies what is to be saved, and returns what writes it.
          needs_others: whether other workers take part.

        Raises:
          CheckpointError: the save before has failed.
          Exception: what ``copy`` raised.
        """
        self.wait()
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            # A daemon: if other workers are gone, Python's own end would wait for ever. It is there before the first
            # copy, and stays: a thread that starts is waited for until it runs.
            threading.Thread(target=_carry_out, args=(self._jobs,), name="replicax-checkpoint", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None).atexit = False
        job = _Job(needs_others, self._gives_up)
        job.write = copy()
        self._last = job
        try:
            _unfinished.add(self)
            _wait_at_exit()
        finally:
            self._jobs.put(job)

    def check(self) -> None:
        """Raise if the last save has failed; does not wait for it.

        Raises:
          CheckpointError: it has. It is raised once.
        """
        if self._last.is_over.is_set():
            self.wait()

    def wait(self) -> None:
        """Wait for the save that is going on.

        Raises:
          CheckpointError: it, or the one before, has failed. It is raised once.
        """
        self._last.is_over.wait()
        error, self._last.error = self._last.error, None
        if error is not None:
            raise error

    def at_exit(self) -> None:
        """Let the save come to its end, as the program does."""
        if not self._last.is_over.wait(FAREWELL if self._last.needs_others else None):
            self._gives_up.set()
            self._last.is_over.wait(1.0)
        if self._last.error is not None:
            log.error("%s", self._last.error)  # nobody is there any more to raise it to


class _Job:
    """A save, and what came of it."""

    def __init__(self, needs_others: bool, gives_up: threading.Event) -> None:
        self.write: Write | None = None
        self.needs_others = needs_others
        self.error: BaseException | None = None
        # Not Thread.join: an interrupt there makes Python 3.11 take the thread for one that has ended.
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
            del write  # with the memory that it has copied to, which the next save takes
            self.is_over.set()


def _carry_out(jobs: queue.SimpleQueue[_Job | None]) -> None:
    """One save after the other, until the :class:`BackgroundSave` is gone."""
    while (job := jobs.get()) is not None:
        job.carry_out()
        del job


_unfinished: weakref.WeakSet[BackgroundSave] = weakref.WeakSet()


@functools.cache
def _wait_at_exit() -> None:
    """From now on; so this comes before what was registered earlier, the end of the workers among it."""
    atexit.register(_at_exit)


def _at_exit() -> None:
    for save in list(_unfinished):
        save.at_exit()
