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
import weakref
from typing import Any

from replicax import _jax
from replicax.workers.heartbeat_page import UNKNOWN, HeartbeatPage, Phase

QUICKEST, SLOWEST = 0.02, 0.05
"""Shortest and longest time between two looks, in seconds."""
COMPUTED = 0.1
"""Seconds between two looks at the work of processors."""
LONGEST_SAMPLE = 0.5
"""A longer time between two looks is not known enough."""
STALLED, RARELY = 2.0, 0.2
"""After so many seconds without progress the thread looks for threads in host callbacks; and every so many seconds, as
a thread that is ready to run looks as if its process could go on."""
AHEAD = 40
"""A program has ended if so many were launched after it: JAX runs some thirty programs ahead."""
FADES = 0.8
"""A program is expected to take as long as its longest call, which counts less with each shorter call after it."""
_SAMPLED = (Phase.STEPS, Phase.INPUT, Phase.EVALUATION_STEPS, Phase.LOGGING, Phase.CALLBACKS)
CALLING: Any = object()
ENDED: Any = object()
"""Outputs of a call that has not returned, and of one whose program has ended."""


class Pace:
    """The calls of all programs with one name: a retraced step is the same step."""

    __slots__ = ("calls", "duration", "runs")

    def __init__(self) -> None:
        self.calls = self.runs = 0  # runs: the steps that they have made
        self.duration = UNKNOWN  # of one call, in seconds


class Call:
    """A call of a program; ``output`` shows when it has ended."""

    __slots__ = ("launched_at", "output", "pace")

    def __init__(self, pace: Pace, launched_at: float) -> None:
        self.pace, self.launched_at = pace, launched_at
        self.output: Any = CALLING

    def has_ended(self) -> bool | None:
        """Whether the program has ended; ``None`` if unknown."""
        output = self.output
        if output is CALLING or output is ENDED:
            return output is ENDED
        if isinstance(output, weakref.ref):
            output = output()
        try:
            return None if output is None else bool(output.is_ready())
        except RuntimeError:  # a later program has taken its memory
            return None


class StepTimer:
    """The thread of the step timer; ``calls`` are those that are not known to have ended, which it removes."""

    def __init__(self, page: HeartbeatPage, calls: list[Call]) -> None:
        self._page, self._calls = page, calls
        self.thread = threading.main_thread().ident  # the one that trains
        self._stopped = self._is_stalled = False
        self._is_idle = False  # whether the last program is known to have ended
        self._computes = False  # whether all time since processors were looked at was spent on steps
        self._looked_at = self._cpu = self._computed_at = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="replicax-step-timer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread: one that is inside JAX when Python ends crashes the process."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._stopped:
            with contextlib.suppress(Exception):  # the launcher judges a page that is not updated by its age
                self.look()
            time.sleep(RARELY if self._is_stalled else min(max(QUICKEST, self._page.expected / 12), SLOWEST))

    def look(self) -> None:
        """Write the progress of the devices into the page, and what the time since the last look went to."""
        now, page = time.monotonic(), self._page
        self._note_ends(now)
        self._sample(now)
        self._is_stalled = now - max(page.progress, page.finished_at) > STALLED
        page.in_callback = self._is_stalled and any(map(_is_in_a_callback, list(sys._current_frames().values())))
        page.tick = self._looked_at = now

    def _note_ends(self, now: float) -> None:
        page, calls = self._page, self._calls[:]
        states = [call.has_ended() for call in calls]
        guessed = len(calls) if False not in states else len(calls) - AHEAD
        known = [i for i, ended in enumerate(states) if ended or (ended is None and i < guessed)]
        count = known[-1] + 1 if known else 0
        if count:
            each = (now - max(page.finished_at, calls[0].launched_at)) / count
            for call in calls[:count]:
                call.pace.duration = max(each, each + FADES * (call.pace.duration - each))
            del self._calls[:count]
            page.finished_at, page.expected = now, max(call.pace.duration for call in calls[:count])
            page.finished += count
        self._is_idle = states[-1] is True if states else self._is_idle
        if calls[count:]:
            expected = 0.0  # until the end of one that can be seen
            for call, ended in zip(calls[count:], states[count:], strict=True):
                expected = UNKNOWN if UNKNOWN in (expected, call.pace.duration) else expected + call.pace.duration
                if ended is not None:
                    break
            page.expected = expected

    def _sample(self, now: float) -> None:
        page, seconds = self._page, now - self._looked_at
        is_of_steps = page.phase in _SAMPLED and seconds <= LONGEST_SAMPLE
        self._computes &= is_of_steps
        if page.cpu and now - self._computed_at >= COMPUTED:
            before, self._cpu = self._cpu, _processor_seconds()
            page.computed += max(0.0, self._cpu - before) if self._computes else 0.0
            self._computes, self._computed_at = is_of_steps, now
        if not is_of_steps:
            return
        page.sampled += seconds
        is_calling = bool(self._calls) and self._calls[-1].output is CALLING
        if self._is_idle and not self._calls:
            page.idle += seconds
            page.host += seconds
            if page.phase == Phase.INPUT:
                page.input += seconds
        elif not is_calling and not _is_in_jax(self.thread):
            page.host += seconds


def _processor_seconds() -> float:
    """For how many seconds the threads of this process have had a processor, except Python's.

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


def _is_in_jax(thread: int | None) -> bool:
    """Whether a thread runs JAX's Python: after a launch it then most probably waits for the end of its program."""
    frame = sys._current_frames().get(thread or 0)
    return frame is not None and _jax.is_of_jax(frame.f_code)


def _is_in_a_callback(frame: Any) -> bool:
    """Whether a thread with this frame is in Python that a program called."""
    while frame is not None and not _jax.is_host_callback(frame.f_code):
        frame = frame.f_back
    return frame is not None
