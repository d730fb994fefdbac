"""The thread that writes a checkpoint while training goes on."""

from __future__ import annotations

import atexit
import functools
import threading
import weakref
from collections.abc import Callable

FAREWELL = 20.0
"""For how many seconds the end of the program waits for a save that needs other workers, who may be gone."""


class BackgroundSave:
    """At most one save that is going on, and what came of the last.

    A save that has failed raises its error at the next call of anything here. A program that comes to its end waits
    until its checkpoint is written.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._needs_others = False
        self._ends = threading.Event()

    def begin(self, write: Callable[[Callable[[], bool]], None], needs_others: bool) -> None:
        """Write in the background; waits for the save before.

        Args:
          write: does it; it is given a function that says whether the program is at its end and waits no longer.
          needs_others: whether other workers take part.

        Raises:
          CheckpointError: the save before has failed.
        """
        self.wait()

        def run() -> None:
            try:
                write(self._ends.is_set)
            except BaseException as error:
                self._error = error

        self._needs_others = needs_others
        # A daemon: if other workers are gone, Python's own end would wait for ever.
        self._thread = threading.Thread(target=run, name="replicax-checkpoint", daemon=True)
        self._thread.start()
        _unfinished.add(self)
        _wait_at_exit()

    def check(self) -> None:
        """Raise if the last save has failed; does not wait for it.

        Raises:
          CheckpointError: it has. It is raised once.
        """
        if self._thread is None or not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the save that is going on.

        Raises:
          CheckpointError: it, or the one before, has failed. It is raised once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def at_exit(self) -> None:
        """Let the save come to its end, as the program does."""
        thread = self._thread
        if thread is None:
            return
        thread.join(FAREWELL if self._needs_others else None)
        self._ends.set()
        if thread.is_alive():
            thread.join(1.0)


_unfinished: weakref.WeakSet[BackgroundSave] = weakref.WeakSet()


@functools.cache
def _wait_at_exit() -> None:
    """From now on; so this comes before what was registered earlier, the end of the workers among it."""
    atexit.register(_at_exit)


def _at_exit() -> None:
    for save in list(_unfinished):
        save.at_exit()
