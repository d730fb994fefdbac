"""The heartbeat: a worker reports its progress to the launcher, whose watchdog can then tell when it hangs.

Each launch of a program is noted, and so is the start of everything else that may take long (:func:`phase`). A thread,
the *step timer*, watches the progress of the devices (:mod:`~replicax.workers.step_timer`). All of it is numbers in a
page of memory that the launcher reads (:mod:`~replicax.workers.heartbeat_page`) and judges
(:mod:`replicax.launcher.watchdog`). Without the launcher there is no page, and nothing is written.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from replicax import _jax
from replicax.workers.heartbeat_page import VARIABLE, HeartbeatPage, Phase, claimed_page
from replicax.workers.step_timer import CALLING, ENDED, Call, Pace, StepTimer

_SMALL = 4096
"""A result of at most this many bytes is kept to see when its program has ended."""
_FEW = 8
"""A small result is looked for among so many, the first."""


class Heartbeat:
    """Writes this worker's progress into its page."""

    def __init__(self, page: HeartbeatPage) -> None:
        self.page = page
        self._calls: list[Call] = []
        self._last: Call | None = None
        self._paces: dict[str, Pace] = {}
        self.timer = StepTimer(page, self._calls)
        self._name = ""
        self._before: list[int] = []  # the phases in which compilations began

    def begin(self) -> None:
        """Tell the launcher that this process has the page, and start the step timer."""
        page = self.page
        page.phase, page.step, page.thread = Phase.START, -1, os.getpid()
        page.progress = page.tick = time.monotonic()
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # standard error may be closed
            asked = int(signal.SIGRTMAX) - 3  # most probably unused by others
            faulthandler.register(asked, file=2, all_threads=True)
            page.signal = asked
        _jax.on_compilations(self._compiling, self._compiled)
        os.register_at_fork(after_in_child=_forget)
        atexit.register(self._end)
        self.timer.start()
        page.pid = os.getpid()  # last: it marks the rest as valid

    # --- called by the thread that trains -------------------------------------------------------------------

    def launching(self, name: str, steps: int | None) -> None:
        """A program is about to be launched: ``name``, which makes so many ``steps``, if several."""
        page = self.page
        if name != self._name:
            page.name = self._name = name
        pace = self._paces.get(name)
        if pace is None:
            pace = self._paces[name] = Pace()
        pace.calls += 1
        pace.runs += steps or 1
        if pace.calls > page.calls:
            page.calls = pace.calls
        page.progress = now = time.monotonic()
        self._last = call = Call(pace, now)
        self._calls.append(call)
        page.launched += 1
        page.runs = pace.runs
        if (thread := threading.get_ident()) != self.timer.thread:
            self.timer.thread, page.thread = thread, threading.get_native_id()
        if page.phase == Phase.START:
            page.phase = Phase.STEPS

    def launched(self, returned: Sequence[tuple[Sequence[Any], Sequence[Any]]], ended: bool) -> None:
        """The program has been launched.

        Args:
          returned: the arrays that it writes, and its results; empty if the launch failed.
          ended: whether the caller waited for its end.
        """
        assert self._last is not None
        if ended or not returned:
            self._last.output = ENDED
            return
        written, results = returned[0]
        some = results or written
        if self._last.pace.calls == 1 and some:
            self.page.cpu = _jax.is_on_cpu(some[0])
        small = next((array for array in results[:_FEW] if array.nbytes <= _SMALL), None)
        self._last.output = weakref.ref(some[0]) if small is None and some else small

    def is_of_this_thread(self) -> bool:
        """Whether this is the thread that trains: the last one that launched a program, or the main thread."""
        return threading.get_ident() == self.timer.thread

    def switch(self, phase: int) -> int:
        """Enter a phase; returns the one before."""
        page = self.page
        before, page.phase = page.phase, phase
        if phase == Phase.START:
            page.step = -1
        page.progress = time.monotonic()
        if before == Phase.COMPILE and self._last is not None and self._last.output is CALLING:
            self._last.launched_at = page.progress  # compiling is no part of what the program takes
        return before

    def _compiling(self) -> None:
        if self.is_of_this_thread():
            self._before.append(self.switch(Phase.COMPILE))

    def _compiled(self) -> None:
        if self.is_of_this_thread() and self._before:
            self.switch(self._before.pop())

    def _end(self) -> None:
        if current is self:  # a process that the worker has forked may end in the same way
            self.switch(Phase.END)
            self.timer.stop()


# --- of this process ------------------------------------------------------------------------------------


current: Heartbeat | None = None
"""The heartbeat of this process, if the launcher started it."""


def _forget() -> None:
    """In a forked process, which is not the worker."""
    global current
    current = None


if VARIABLE in os.environ and (_page := claimed_page(os.environ[VARIABLE])) is not None:
    current = Heartbeat(_page)
    current.begin()


def made(step: int) -> None:
    """``step`` steps of the run have been launched."""
    if current is not None:
        current.page.step = step


def switch(to: Phase) -> None:
    """Enter a phase; see :func:`phase`."""
    if current is not None:
        current.switch(to)


@contextmanager
def phase(to: Phase) -> Iterator[None]:
    """Enter a phase for a ``with`` block, or for each call of a function that this decorates."""
    beat = current
    if beat is None or not beat.is_of_this_thread():
        yield
        return
    before = beat.switch(to)
    try:
        yield
    finally:
        beat.switch(before)


def paused() -> AbstractContextManager[None]:
    """Tell the launcher that no step comes for a while: it does not expect one inside the ``with`` block.

    ``replicax launch`` takes a worker for hung if it makes no step for 10 s and does not compute on its processor
    either (``--hang-timeout``). It knows that compilation, input, evaluation by steps, saving and restoring take long.
    Use this for anything else that waits for long between the steps of a run: for a network, a disk or another
    process. Other workers may wait for this one meanwhile. Without the launcher it does nothing.

    >>> import replicax
    >>> with replicax.paused():
    ...     pass  # upload samples, wait for a person, …
    """
    return phase(Phase.PAUSED)
