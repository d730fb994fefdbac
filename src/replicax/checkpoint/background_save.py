"""A thread that writes checkpoints while training continues."""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

log = logging.getLogger("replicax")

Write = Callable[[Callable[[], bool]], None]
"""Writes a checkpoint; its argument is a function that returns whether to give up, at the end of the program."""

Jobs = queue.SimpleQueue[tuple[Write, Future[None], threading.Event] | None]
"""Saves for the thread; ``None`` ends it."""

SHUTDOWN_PATIENCE = 20.0
"""For how many seconds the end of the program waits for a save that needs other workers, which may be gone."""


class BackgroundSave:
    """Runs at most one save at a time.

    The next call of any method raises the error of a failed save, once. The end of the program waits until its
    checkpoint is written.
    """

    def __init__(self) -> None:
        self._gives_up = threading.Event()
        # The last save, until it is known to be written or its error is raised. It is waited for, and not the thread:
        # after an interrupt in Thread.join Python 3.11 takes the thread for ended.
        self._last: Future[None] | None = None
        self._jobs: Jobs | None = None

    def begin(self, copy: Callable[[], Write], needs_others: bool) -> None:
        """Wait for the previous save, copy at once, and write in the background.

        ``copy`` copies the values, and returns a function that writes them. At the end of the program, a save that
        ``needs_others`` gives up after some time, as other workers may be gone.
        """
        self.wait()
        if self._jobs is None:
            jobs: Jobs = queue.SimpleQueue()
            weakref.finalize(self, jobs.put, None).atexit = False
            # A daemon: if other workers are gone, Python's own shutdown would wait for ever. It starts before the first
            # copy and stays, because starting a thread waits until it runs.
            threading.Thread(target=_carry_out, args=(jobs,), name="replicax-checkpoint", daemon=True).start()
            self._jobs = jobs  # only now: without a thread, a save would never end
        job = copy(), Future[None](), self._gives_up
        self._last = job[1]
        try:
            _unfinished[self._last] = self._gives_up if needs_others else None
            _wait_at_exit()
        finally:
            self._jobs.put(job)

    def check(self) -> None:
        """Raise the error of a save that has failed, as :meth:`wait` does, without waiting for one that is running."""
        save = self._last
        if save is not None and save.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the current save; raises a CheckpointError, once, if the last one has failed."""
        save = self._last
        if save is None:
            return
        error = save.exception()
        _unfinished.pop(save, None)
        self._last = None
        if error is not None:
            raise error


def _carry_out(jobs: Jobs) -> None:
    """Run saves one after the other, until the :class:`BackgroundSave` is gone."""
    while (job := jobs.get()) is not None:
        write, save, gives_up = job
        del job
        error = None
        try:
            write(gives_up.is_set)
        except BaseException as why:
            error = why
        del write  # with the memory of its copies, which the next save reuses
        if error is None:
            _unfinished.pop(save, None)
            save.set_result(None)
        else:
            save.set_exception(error)
        del save, error


_unfinished: dict[Future[None], threading.Event | None] = {}
"""The saves of this process that are still running, or whose error has not been raised yet.

Each has the event that makes it give up waiting for other workers; ``None`` if it needs none.
"""


def wait_for_all() -> None:
    """Wait for all saves of this process; their own callers get the errors."""
    concurrent.futures.wait(list(_unfinished))


@functools.cache
def _wait_at_exit() -> None:
    """Register the wait; exit handlers that are registered earlier, such as the end of the workers, run after it."""
    atexit.register(_at_exit)


def _at_exit() -> None:
    for save, gives_up in list(_unfinished.items()):
        concurrent.futures.wait([save], None if gives_up is None else SHUTDOWN_PATIENCE)
        if gives_up is not None and not save.done():
            gives_up.set()
            concurrent.futures.wait([save], 1.0)
        if save.done() and (error := save.exception()) is not None:
            log.error("%s", error)  # no caller is left to raise it to
