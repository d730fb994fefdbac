"""The heartbeat: a worker reports its progress to the launcher, whose watchdog can then tell when it hangs.

Each launch of a program is noted, and so is the start of everything else that may take long (:func:`phase`). A thread,
the *step timer*, notes when programs end: that is progress, and how long they take tells the launcher how long one may
take. All of it is numbers in a page of memory that the launcher reads (:mod:`~replicax.workers.heartbeat_page`) and
judges (:mod:`replicax.launcher.watchdog`). Without the launcher there is no page, and nothing is written.

Workers that communicate in each step take equally long for it, however slow one of them is. The slow one is the one
for which the others wait while it waits for none. The host can't see waits inside a program, so the timer samples:

- the devices are *idle* if the last program has ended, and the host has not launched the next one. Meanwhile the
  others' devices wait in their first collective. A host that is ahead of its devices has no idle devices.
- the *host* is busy unless it waits for its devices. Where all hosts are busy for equally long, one of them may always
  come last without being slower than the others.
- on CPUs, processors compute. Waiting for another worker takes none.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

import jax

from replicax import _jax
from replicax.workers.heartbeat_page import UNKNOWN, VARIABLE, HeartbeatPage, Phase
from replicax.workers.launch_log import LaunchedProgram

ARMED = 5
"""A worker has started when it has run one program so often. Programs before its first step run once."""
INTERVAL, SELDOM = 0.03, 4
"""Seconds between two looks of the timer, and in every how many it looks at processors and callbacks, too."""
AHEAD = 40
"""A program has ended if so many were launched after it: JAX runs some thirty programs ahead."""
FADES = 0.8
"""A program is expected to take as long as its longest run, which counts less with each shorter run after it."""
_OF_STEPS = (Phase.STEPS, Phase.INPUT, Phase.LOGGING, Phase.CALLBACKS)
"""Their time is a step's, as are waits for the other workers that begin in them."""


class Heartbeat:
    """Writes this worker's progress into its page."""

    def __init__(self, page: HeartbeatPage) -> None:
        self.page = page
        page.thread = os.getpid()
        self.launches: list[LaunchedProgram] = []  # not known to have ended; the timer removes them
        self._since = 0.0  # programs that are running began after this time
        self._thread = threading.main_thread().ident  # the one that trains
        self._runs: collections.Counter[str] = collections.Counter()
        self._before: list[int] = []  # the phases in which compilations began
        self._is_in_steps = False
        self._usual: dict[str, float] = {}  # seconds that a program takes, by its name: a retraced step is the same
        self._looked_at, self._looks, self._computed = time.monotonic(), 0, 0.0
        self._is_over = threading.Event()
        self._timer = threading.Thread(target=self._run, name="replicax-step-timer", daemon=True)

    def begin(self) -> None:
        """Start to report."""
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # standard error may be closed
            asked = int(signal.SIGRTMAX) - 3  # most probably unused by others
            faulthandler.register(asked, file=2, all_threads=True)
            self.page.signal = asked
        _jax.on_compilations(self._compiling, self._compiled)
        os.register_at_fork(after_in_child=_forget)
        atexit.register(self._end)
        self._timer.start()

    # --- called by the thread that trains -------------------------------------------------------------------

    def launching(self, launch: LaunchedProgram) -> None:
        """A program is about to be launched."""
        page, name = self.page, launch.label.name
        self._runs[name] += 1
        page.name, page.runs = name.encode(errors="replace")[:255], self._runs[name]
        self.launches.append(launch)
        page.launched += 1
        page.running, page.progress = len(self.launches), launch.since
        if (thread := threading.get_ident()) != self._thread:
            self._thread, page.thread = thread, threading.get_native_id()
        if page.phase == Phase.START and page.runs >= ARMED:
            self.switch(Phase.STEPS)

    def is_of_this_thread(self) -> bool:
        """Return whether this is the thread that trains: the last one that launched a program, or the main thread."""
        return threading.get_ident() == self._thread

    def switch(self, phase: int) -> int:
        """Enter a phase; returns the one before."""
        page = self.page
        self._is_in_steps = phase in _OF_STEPS or (self._is_in_steps and phase == Phase.RENDEZVOUS)
        before, page.phase, page.progress = page.phase, phase, time.monotonic()
        return before

    def _compiling(self) -> None:
        if self.is_of_this_thread():
            self._before.append(self.switch(Phase.COMPILE))

    def _compiled(self) -> None:
        if self.is_of_this_thread() and self._before:
            self.switch(self._before.pop())
            self._since = self.page.progress  # compiling is no part of what a program takes

    def _end(self) -> None:
        if current is self:  # a process that the worker has forked may end in the same way
            self.switch(Phase.END)
            self._is_over.set()
            self._timer.join(timeout=2.0)  # a thread that is inside JAX when Python ends crashes the process

    # --- the step timer -------------------------------------------------------------------------------------

    def _run(self) -> None:
        self.page.timer = threading.get_native_id()
        while not self._is_over.wait(INTERVAL):
            with contextlib.suppress(Exception):  # training goes on without it
                self.look()

    def look(self) -> None:
        """Write the progress of the devices into the page, and what the time since the last look went to."""
        now, page = time.monotonic(), self.page
        self._note_ends(now)
        if self._is_in_steps:
            self._sample(now - self._looked_at)
        self._looked_at = now
        self._looks += 1
        if self._looks % SELDOM == 0:
            page.in_callback = any(map(_is_in_a_callback, sys._current_frames().values()))
            before, self._computed = self._computed, _processor_seconds()
            if self._is_in_steps and page.launched and jax.default_backend() == "cpu":
                page.computed += max(0.0, self._computed - before)

    def _note_ends(self, now: float) -> None:
        page, launches = self.page, self.launches[:]
        states = [launch.has_ended() for launch in launches]
        # Programs end in the order of their launches.
        ended = max(0, len(states) - AHEAD, *(i for i, has_ended in enumerate(states, start=1) if has_ended))
        if False in states[ended:]:
            until_next_end = launches[ended : states.index(False, ended) + 1]
        else:  # none of them can be seen to be running
            ended, until_next_end = len(states), launches[-1:]
        if ended:
            seconds = (now - max(self._since, launches[0].since)) / ended
            for launch in launches[:ended]:
                usual = self._usual.get(launch.label.name, seconds)
                self._usual[launch.label.name] = max(seconds, FADES * usual + (1 - FADES) * seconds)
            del self.launches[:ended]
            page.progress = self._since = now
        page.running = len(self.launches)
        if launches:
            page.expected = sum(self._usual.get(launch.label.name, UNKNOWN) for launch in until_next_end)

    def _sample(self, seconds: float) -> None:
        page = self.page
        page.sampled += seconds
        if page.phase == Phase.RENDEZVOUS:
            return
        if not self.launches:
            page.idle += seconds
            page.host += seconds
            page.input += seconds if page.phase == Phase.INPUT else 0.0
        elif self.launches[-1].has_returned:
            frame = sys._current_frames().get(self._thread or 0)
            if frame is not None and not _jax.is_of_jax(frame.f_code):
                page.host += seconds  # in JAX it most probably waits for the end of a program


def _processor_seconds() -> float:
    """Return the seconds for which this process' threads, except Python's, were scheduled.

    Idle devices already include Python's work between two steps; and no step waits for Python's work beside the steps,
    such as reading ahead or writing a checkpoint.
    """
    seconds = time.process_time()
    for thread in threading.enumerate():
        if thread.native_id is not None:
            # ``time.pthread_getcpuclockid`` is undefined for a thread that has ended. This is part of the kernel's ABI:
            clock = (~thread.native_id << 3) | 6  # CPUCLOCK_PERTHREAD_MASK, CPUCLOCK_SCHED
            with contextlib.suppress(OSError):  # it has just ended
                seconds -= time.clock_gettime(clock)
    return seconds


def _is_in_a_callback(frame: FrameType | None) -> bool:
    """Return whether a thread with this frame is in Python that a program called."""
    while frame is not None and not _jax.is_host_callback(frame.f_code):
        frame = frame.f_back
    return frame is not None


current: Heartbeat | None = None  # of this process, if the launcher started it


def _forget() -> None:
    """Forget the page in a forked process, which is not the worker."""
    global current
    current = None


if VARIABLE in os.environ and (_page := HeartbeatPage.claimed(os.environ[VARIABLE])) is not None:
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
