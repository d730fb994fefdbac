"""The heartbeat: a worker reports its progress to the launcher, whose watchdog can then tell when it hangs.

Each launch of a program is noted, and so is the start of everything else that may take long (:func:`phase`). A thread,
the *step timer*, watches the progress of the devices (:mod:`~replicax.workers.step_timer`). All of it is numbers in a
page of memory that the launcher reads (:mod:`~replicax.workers.heartbeat_page`) and judges
(:mod:`replicax.launcher.watchdog`). Without the launcher there is no page, and nothing is written.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from replicax import _jax
from replicax.workers.heartbeat_page import VARIABLE, HeartbeatPage, Phase, claimed_page
from replicax.workers.launch_log import LaunchedProgram
from replicax.workers.step_timer import StepTimer

ARMED = 5
"""A worker has started when it has run one program so often. Programs before its first step run once."""


class Heartbeat:
    """Writes this worker's progress into its page."""

    def __init__(self, page: HeartbeatPage) -> None:
        self.page = page
        page.thread = os.getpid()
        self.timer = StepTimer(page)
        self._thread = threading.Thread(target=self.timer.run, name="replicax-step-timer", daemon=True)
        self._runs: collections.Counter[str] = collections.Counter()
        self._before: list[int] = []  # the phases in which compilations began

    def begin(self) -> None:
        """Start to report."""
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # standard error may be closed
            asked = int(signal.SIGRTMAX) - 3  # most probably unused by others
            faulthandler.register(asked, file=2, all_threads=True)
            self.page.signal = asked
        _jax.on_compilations(self._compiling, self._compiled)
        os.register_at_fork(after_in_child=_forget)
        atexit.register(self._end)
        self._thread.start()

    # --- called by the thread that trains -------------------------------------------------------------------

    def launching(self, launch: LaunchedProgram) -> None:
        """A program is about to be launched."""
        page, timer, name = self.page, self.timer, launch.label.name
        self._runs[name] += 1
        page.name, page.runs = name.encode(errors="replace")[:255], self._runs[name]
        timer.launches.append(launch)
        page.launched += 1
        page.running, page.progress = len(timer.launches), launch.since
        if (thread := threading.get_ident()) != timer.thread:
            timer.thread, page.thread = thread, threading.get_native_id()
        if page.phase == Phase.START and page.runs >= ARMED:
            self.switch(Phase.STEPS)

    def is_of_this_thread(self) -> bool:
        """Return whether this is the thread that trains: the last one that launched a program, or the main thread."""
        return threading.get_ident() == self.timer.thread

    def switch(self, phase: int) -> int:
        """Enter a phase; returns the one before."""
        page = self.page
        self.timer.enter(phase)
        before, page.phase, page.progress = page.phase, phase, time.monotonic()
        return before

    def _compiling(self) -> None:
        if self.is_of_this_thread():
            self._before.append(self.switch(Phase.COMPILE))

    def _compiled(self) -> None:
        if self.is_of_this_thread() and self._before:
            self.switch(self._before.pop())
            self.timer.since = self.page.progress  # compiling is no part of what a program takes

    def _end(self) -> None:
        if current is self:  # a process that the worker has forked may end in the same way
            self.switch(Phase.END)
            self.timer.is_over.set()
            self._thread.join(timeout=2.0)  # a thread that is inside JAX when Python ends crashes the process


# --- of this process ------------------------------------------------------------------------------------


current: Heartbeat | None = None
"""The heartbeat of this process, if the launcher started it."""


def _forget() -> None:
    """Forget the page in a forked process, which is not the worker."""
    global current
    current = None


if VARIABLE in os.environ and (_page := claimed_page(os.environ[VARIABLE])) is not None:
    current = Heartbeat(_page)
    current.begin()


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
