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
        # Not Thread.join: an interrupt there makes Python 3.11 take the thread for one that has ended.
        self._is_over = threading.Event()
        self._is_over.set()
        self._error: BaseException | None = None
        self._needs_others = False
        self._gives_up = threading.Event()

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
        is_over = threading.Event()
        jobs: queue.SimpleQueue[Write | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                write = jobs.get()
                if write is not None:
                    write(self._gives_up.is_set)
            except BaseException as error:
                self._error = error
            finally:
                is_over.set()

        # A daemon: if other workers are gone, Python's own end would wait for ever. It is there before the copy, as
        # to start it afterwards would let it run first.
        threading.Thread(target=run, name="replicax-checkpoint", daemon=True).start()
        write = None
        try:
            write = copy()
        finally:
            if write is not None:
                self._is_over, self._needs_others = is_over, needs_others
                _unfinished.add(self)
                _wait_at_exit()
            jobs.put(write)

    def check(self) -> None:
        """Raise if the last save has failed; does not wait for it.

        Raises:
          CheckpointError: it has. It is raised once.
        """
        if self._is_over.is_set():
            self.wait()

    def wait(self) -> None:
        """Wait for the save that is going on.

        Raises:
          CheckpointError: it, or the one before, has failed. It is raised once.
        """
        self._is_over.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def at_exit(self) -> None:
        """Let the save come to its end, as the program does."""
        if not self._is_over.wait(FAREWELL if self._needs_others else None):
            self._gives_up.set()
            self._is_over.wait(1.0)
        if self._error is not None:
            log.error("%s", self._error)  # nobody is there any more to raise it to


_unfinished: weakref.WeakSet[BackgroundSave] = weakref.WeakSet()


@functools.cache
def _wait_at_exit() -> None:
    """From now on; so this comes before what was registered earlier, the end of the workers among it."""
    atexit.register(_at_exit)


def _at_exit() -> None:
    for save in list(_unfinished):
        save.at_exit()
