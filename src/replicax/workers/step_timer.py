"""The step timer: a thread that tells the launcher how far the devices are, and what this worker's time goes to.

A program that has ended is progress. How long programs take tells the launcher how long one may take.

Workers that communicate in each step take equally long for it, however slow one of them is. The slow one is the one
for which the others wait while it waits for none. The host can't see waits inside a program, so the thread samples:

- the devices are *idle* if the last program has ended, and the host has not launched the next one. Meanwhile the
  others' devices wait in their first collective. A host that is ahead of its devices has no idle devices.
- the *host* is busy unless it waits for its devices. Where all hosts are busy for equally long, one of them may always
  come last without being slower than the others.
- on CPUs, processors compute. Waiting for another worker takes none.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from types import FrameType

import jax

from replicax import _jax
from replicax.workers.heartbeat_page import UNKNOWN, HeartbeatPage, Phase
from replicax.workers.launch_log import LaunchedProgram

INTERVAL, SELDOM = 0.03, 4
"""Seconds between two looks, and in every how many looks the thread looks at processors and callbacks, too."""
AHEAD = 40
"""A program has ended if so many were launched after it: JAX runs some thirty programs ahead."""
FADES = 0.8
"""A program is expected to take as long as its longest run, which counts less with each shorter run after it."""
_OF_STEPS = (Phase.STEPS, Phase.INPUT, Phase.LOGGING, Phase.CALLBACKS)
"""Their time is a step's, as are waits for the other workers that begin in them."""


class StepTimer:
    """The work of the timer's thread.

    Attributes:
      launches: the launches not known to have ended. The thread that trains adds them, and this one removes them.
      since: programs that are running began after this time.
      thread: the one that trains.
      is_in_steps: whether this time is a step's.
      is_over: set at the end.
    """

    def __init__(self, page: HeartbeatPage) -> None:
        self._page = page
        self.launches: list[LaunchedProgram] = []
        self.since = 0.0
        self.thread = threading.main_thread().ident
        self.is_in_steps = False
        self.is_over = threading.Event()
        self._usual: dict[str, float] = {}  # seconds that a program takes, by its name: a retraced step is the same
        self._looked_at, self._looks, self._computed = time.monotonic(), 0, 0.0

    def run(self) -> None:
        self._page.timer = threading.get_native_id()
        while not self.is_over.wait(INTERVAL):
            with contextlib.suppress(Exception):  # training goes on without it
                self.look()

    def enter(self, phase: int) -> None:
        """Take note of the phase that the thread that trains enters."""
        self.is_in_steps = phase in _OF_STEPS or (self.is_in_steps and phase == Phase.RENDEZVOUS)

    def look(self) -> None:
        """Write the progress of the devices into the page, and what the time since the last look went to."""
        now, page = time.monotonic(), self._page
        self._note_ends(now)
        if self.is_in_steps:
            self._sample(now - self._looked_at)
        self._looked_at = now
        self._looks += 1
        if self._looks % SELDOM == 0:
            page.in_callback = any(map(_is_in_a_callback, sys._current_frames().values()))
            before, self._computed = self._computed, _processor_seconds()
            if self.is_in_steps and page.launched and jax.default_backend() == "cpu":
                page.computed += max(0.0, self._computed - before)

    def _note_ends(self, now: float) -> None:
        page, launches = self._page, self.launches[:]
        states = [launch.has_ended() for launch in launches]
        # Programs end in the order of their launches.
        ended = max((number for number, has_ended in enumerate(states, start=1) if has_ended), default=0)
        ended = max(ended, len(states) - AHEAD)
        if False in states[ended:]:
            until_next_end = launches[ended : states.index(False, ended) + 1]
        else:  # none of them can be seen to be running
            ended, until_next_end = len(states), launches[-1:]
        if ended:
            seconds = (now - max(self.since, launches[0].since)) / ended
            for launch in launches[:ended]:
                usual = self._usual.get(launch.label.name, seconds)
                self._usual[launch.label.name] = max(seconds, FADES * usual + (1 - FADES) * seconds)
            del self.launches[:ended]
            page.progress = self.since = now
        page.running = len(self.launches)
        if launches:
            page.expected = sum(self._usual.get(launch.label.name, UNKNOWN) for launch in until_next_end)

    def _sample(self, seconds: float) -> None:
        page = self._page
        page.sampled += seconds
        if page.phase == Phase.RENDEZVOUS:
            return
        if not self.launches:
            page.idle += seconds
            page.host += seconds
            page.input += seconds if page.phase == Phase.INPUT else 0.0
        elif self.launches[-1].has_returned:
            frame = sys._current_frames().get(self.thread or 0)
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
