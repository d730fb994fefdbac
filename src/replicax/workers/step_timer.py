"""The step timer: a thread that measures the progress of the devices, and how long they wait for the host.

Workers that communicate in each step take equally long for it, however slow one of them is. The slow one is the one for
which the others wait while it waits for none. The host can't see waits inside a program, but it can measure:

- the *gap*: from the end of a program until the host launches the next one. Meanwhile this worker's devices are idle,
  and the others' devices, whose programs are launched, wait in their first collective. A host that is ahead of its
  devices, as it usually is, has no gap.
- the *host's* time: from the launch of a program, or the end of a wait for one, until the launch of the next. Where all
  hosts take long, one of them may always come last without being slower than the others.
- on CPUs, the processor time of a program. Waiting for another worker takes none.

The time of a launch is known exactly, and so is the end of a program that has ended when its launch returns. Otherwise
the thread polls for the end, at first rarely, then more often as the expected end comes closer. So it polls only a few
times a step, and sees every step that takes some milliseconds or longer; of shorter steps it sees some, because the
number of polls is bounded.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import statistics
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from replicax import _jax
from replicax.workers import heartbeat_page as page
from replicax.workers.heartbeat_page import HeartbeatPage, StepRecord

INTERVAL = 0.25
"""Seconds between two looks at the progress of the devices."""
STALLED = 2.0
"""After how many seconds without progress the thread looks for threads in host callbacks."""
LOOKS = 20
"""How often the thread polls for ends of programs in between, at most."""
QUICKEST, SLOWEST = 1e-3, 0.05
"""Shortest and longest time between two polls for a program that is about to end, in seconds."""
_REMEMBERED = 64
_MANY = 4 * _REMEMBERED
_DURATIONS = 15
_FIRST_GUESS = 0.02
_CALLING: Any = object()
_ENDED: Any = object()


class Pace:
    """The duration of a program.

    Attributes:
      watched: the number of the result that shows when the program has ended; ``None``: none is small enough.
      durations: of the last calls of programs with this name, in seconds: a retraced step is the same step.
      calls: the number of calls.
    """

    __slots__ = ("calls", "durations", "watched")

    def __init__(self, durations: collections.deque[float]) -> None:
        self.durations = durations
        self.watched: int | None = None
        self.calls = 0


class Call:
    """A call of a program.

    Attributes:
      number: among all calls.
      pace: of the program.
      launched_at: the time of the launch.
      waited: for how many seconds in all the host had waited for input by then.
      met: for how many it had waited for other workers.
      breaks: the number of things other than steps that it had done by then.
      output: shows when the program has ended.
      returned_at: when the launch returned.
      ended_at: when the program ended, if known; otherwise 0.
      was_awaited: whether the host waited for its end.
    """

    __slots__ = (
        "breaks", "ended_at", "launched_at", "met", "number", "output", "pace", "returned_at", "waited", "was_awaited",
    )  # fmt: skip

    def __init__(self, number: int, pace: Pace, launched_at: float, waited: float, met: float, breaks: int) -> None:
        self.number, self.pace, self.launched_at = number, pace, launched_at
        self.waited, self.met, self.breaks = waited, met, breaks
        self.output: Any = _CALLING
        self.returned_at = self.ended_at = 0.0
        self.was_awaited = False

    def returned(self, output: Any = None, ended: bool = False) -> None:
        """The launch has returned ``output``, which shows when the program ends; ``ended`` if it already has."""
        self.returned_at = time.monotonic()
        self.output = _ENDED if ended else output
        if self.has_ended():
            self.ended_at = self.returned_at

    def has_ended(self) -> bool | None:
        """Whether the program has ended; ``None`` if unknown."""
        output = self.output
        if output is _CALLING or output is _ENDED:
            return output is _ENDED
        if isinstance(output, weakref.ref):
            output = output()
        try:
            return None if output is None else bool(output.is_ready())
        except RuntimeError:  # a later program has taken its memory
            return None


class Calls:
    """The last calls; one thread adds them, and another one reads them.

    Attributes:
      count: the number of calls.
      thread: the thread that makes them.
      inside: for how many seconds it has computed inside launches, where JAX runs small programs.
    """

    def __init__(self) -> None:
        self._last: collections.deque[Call] = collections.deque(maxlen=_REMEMBERED)
        self._durations: dict[tuple[str, int | None], collections.deque[float]] = {}
        self.count = 0
        self.thread = threading.main_thread().ident
        self.inside = self._began = 0.0
        self._is_inside = False  # whether the last program ran inside its launch

    def new_pace(self, name: str, steps: int | None) -> Pace:
        """The pace of a new program; starts with the durations of programs with this name."""
        return Pace(self._durations.setdefault((name, steps), collections.deque(maxlen=_DURATIONS)))

    def begin(self, pace: Pace, now: float, waited: float, met: float, breaks: int) -> None:
        """Add a call."""
        self.count += 1
        self._last.append(Call(self.count, pace, now, waited, met, breaks))
        if self._is_inside:
            self._began = time.thread_time()

    def returned(self, output: Any = None, ended: bool = False) -> None:
        """The last launch has returned; see :meth:`Call.returned`."""
        call = self._last[-1]
        call.returned(output, ended)
        if self._is_inside:  # reading the clock at every call would cost more than everything else here
            self.inside += time.thread_time() - self._began
        self._is_inside = bool(call.ended_at)

    @property
    def newest(self) -> Call:
        """The last call."""
        return self._last[-1]

    def now(self) -> list[Call]:
        """All calls that are kept."""
        return list(self._last)


class StepTimer:
    """The thread of the step timer."""

    def __init__(self, its_page: HeartbeatPage, calls: Calls, is_wanted: Callable[[], bool]) -> None:
        self._page, self._calls, self._is_wanted = its_page, calls, is_wanted
        self._numbers, self._seconds = its_page.numbers, its_page.seconds
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._first: Call | None = None
        self._finished = 0
        self._finished_at = 0.0
        self._steps = StepWatch(its_page, calls)

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="replicax-step-timer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread: one that is inside JAX when Python ends crashes the process."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while self._is_wanted() and not self._stop.is_set():
            until = time.monotonic() + INTERVAL
            with contextlib.suppress(Exception):  # the launcher judges a page that is not updated by its age
                self.look()
                for _ in range(LOOKS):
                    pause = self.look_for_ends()
                    if time.monotonic() + pause >= until or self._stop.is_set():
                        break
                    time.sleep(pause)  # cheaper than waiting for an event
            self._stop.wait(max(0.01, until - time.monotonic()))

    def look_for_ends(self) -> float:
        """Record the steps that have ended; returns for how many seconds not to poll again."""
        return self._steps.look(time.monotonic())

    def look(self) -> None:
        """Write the progress of the devices into the page."""
        calls = self._calls.now()
        now = time.monotonic()
        if calls and self._first is None:
            self._first = calls[0]
        calls = [call for call in calls if call.number > self._finished]
        newest = next((i for i in range(len(calls) - 1, -1, -1) if calls[i].has_ended()), None)
        if calls and newest is None and not any(call.has_ended() is False for call in calls):
            newest = len(calls) - 1  # none of them can be watched
        if newest is not None:
            self._note_finished(calls[: newest + 1], now)
        seconds = self._seconds
        seconds[page.EXPECTED] = self._expected([call for call in calls if call.number > self._finished])
        since = max(seconds[page.PROGRESS], self._finished_at)
        self._numbers[page.CALLBACK] = now - since > STALLED and _is_in_a_callback()
        seconds[page.TICK] = now

    def _note_finished(self, ended: Sequence[Call], now: float) -> None:
        """Note that these calls have ended, all but the last perhaps long ago."""
        each = (now - max(self._finished_at, ended[0].launched_at)) / (ended[-1].number - self._finished)
        for call in ended:
            call.pace.durations.append(max(each, 0.0))
            call.output = _ENDED
        self._finished, self._finished_at = ended[-1].number, now
        self._seconds[page.FINISHED_AT] = now
        self._seconds[page.USUAL] = statistics.median(call.pace.durations[-1] for call in ended)
        self._numbers[page.FINISHED] = self._finished

    def _expected(self, in_flight: Sequence[Call]) -> float:
        """In about how many seconds the first of these programs whose end can be seen will have ended."""
        total = 0.0
        for call in in_flight:
            if call.pace.durations:
                total += statistics.median(call.pace.durations)
            elif self._first is not None and self._calls.count >= _MANY:
                # JAX runs only some tens of programs ahead, so the others have ended.
                total += (in_flight[-1].launched_at - self._first.launched_at) / self._calls.count
            else:
                return page.UNKNOWN
            if call.has_ended() is not None:
                break
        return total


class StepWatch:
    """Looks for the ends of programs, and records each step between two of them."""

    def __init__(self, its_page: HeartbeatPage, calls: Calls) -> None:
        self._page, self._calls = its_page, calls
        self._next = 0  # the number of the first call that is not recorded yet
        self._open: Call | None = None  # had not ended at the last look
        self._looked_at = 0.0
        self._is_awaited = False
        self._awaited: collections.deque[float] = collections.deque(maxlen=_REMEMBERED)  # ends of the host's waits
        self._last: tuple[Call, float] | None = None  # the last call with a known end, and the processor time then
        self._cpu: dict[int, float] = {}  # by the number of a call, when its end was seen
        self._periods: collections.deque[float] = collections.deque(maxlen=9)
        self._period = _FIRST_GUESS  # of the last ones, the median
        self._works: collections.deque[float] = collections.deque(maxlen=9)
        self._working = 0.0  # and for how long the devices work on one, at least

    def look(self, now: float) -> float:
        """Look which programs have ended; returns for how many seconds not to look again."""
        if self._open is None or self._open.has_ended() is not False:
            calls = self._calls.now()
            self._find_ends([call for call in calls if call.number >= self._next], now)
            for call, after in itertools.pairwise(calls):
                if call.number >= self._next and call.has_ended() is not False:
                    self._next = call.number + 1
                    self._record(call, after)
        self._looked_at = now
        fine = look_interval(self._period)
        if self._open is None:
            return max(fine, self._period / 4)
        begun = max(self._open.launched_at, 0.0 if self._last is None else self._last[0].ended_at)
        left = begun + self._working - now
        self._is_awaited = left < 2 * fine and _is_in_jax(self._calls.thread)
        return min(max(fine, 0.85 * left), INTERVAL)

    def _find_ends(self, calls: Sequence[Call], now: float) -> None:
        was_open, self._open = self._open, None
        for call in calls:
            ended = call.has_ended()
            if ended is False:
                self._open = call
                break
            if ended and not call.ended_at:
                # In the middle between two known times: on average neither too early nor too late.
                since = self._looked_at if call is was_open else call.launched_at
                if now - since <= max(self._period / 4, 2 * QUICKEST):
                    call.ended_at = (since + now) / 2
                    call.was_awaited = call is was_open and self._is_awaited
        known = [call.number for call in calls if call.ended_at and call.number not in self._cpu]
        if known:
            self._cpu = {number: cpu for number, cpu in self._cpu.items() if number >= calls[0].number}
            self._cpu.update(dict.fromkeys(known, self._calls.inside + _processor_seconds()))

    def _record(self, call: Call, after: Call) -> None:
        """Record the step that ends with ``call``, once the next one has been launched."""
        last, self._last = self._last, None
        cpu = self._cpu.get(call.number)
        if call.was_awaited:
            self._awaited.append(call.ended_at)
        if not call.ended_at or cpu is None:
            self._last = last  # it ended too quickly to be seen: the step goes on
            return
        if call.breaks == after.breaks:
            self._last = call, cpu
        if last is None or last[0].breaks != call.breaks or self._last is None:
            return
        before, cpu_before = last
        number = call.number - before.number
        met = after.met - call.met
        gap = max(0.0, after.launched_at - met - call.ended_at)
        # A host that is ahead waits for another program than the one that it launched last.
        awaited = max((at for at in self._awaited if at <= after.launched_at), default=0.0)
        host = max(0.0, after.launched_at - met - max(call.returned_at, awaited))
        period = max(1e-6, call.ended_at - before.ended_at - (call.met - before.met))
        self._periods.append(period / number)
        self._period = statistics.median(self._periods)
        if number == 1:
            self._works.append(call.ended_at - max(call.launched_at, before.ended_at))
            self._working = min(self._works)
        self._page.record(
            StepRecord(
                at=call.ended_at,
                period=period / number,
                gap=gap,
                host=host,
                waited=min(host, after.waited - call.waited),
                computed=max(0.0, cpu - cpu_before) / number,
            )
        )


def look_interval(period: float) -> float:
    """How many seconds to wait between two looks at a step that takes ``period`` and is about to end.

    >>> from replicax.workers.step_timer import look_interval
    >>> look_interval(0.001), look_interval(0.12), look_interval(10.0)
    (0.001, 0.01, 0.05)
    """
    return min(SLOWEST, max(QUICKEST, period / 12))


def _processor_seconds() -> float:
    """For how many seconds the threads of this process have had a processor, except Python's.

    The gap already includes Python's work between two steps; and no step waits for Python's work beside the steps,
    such as reading ahead or writing a checkpoint.
    """
    seconds = time.process_time()
    for thread in threading.enumerate():
        if thread.native_id is not None:
            with contextlib.suppress(OSError):  # it has just ended
                seconds -= time.clock_gettime(_clock_of(thread.native_id))
    return seconds


def _is_in_jax(thread: int | None) -> bool:
    """Whether a thread runs JAX's Python: after a launch it then most probably waits for the end of its program."""
    frame = sys._current_frames().get(thread or 0)
    return frame is not None and _jax.is_of_jax(frame.f_code)


def _clock_of(thread: int) -> int:
    """The clock of a thread's processor time, by the kernel's number of the thread.

    ``time.pthread_getcpuclockid`` is undefined for a thread that has ended.
    """
    return (~thread << 3) | 6  # CPUCLOCK_PERTHREAD_MASK, CPUCLOCK_SCHED: part of the kernel's ABI


def _is_in_a_callback() -> bool:
    """Whether a thread is in Python that a program called."""
    for found in sys._current_frames().values():
        frame: FrameType | None = found
        while frame is not None:
            if _jax.is_host_callback(frame.f_code):
                return True
            frame = frame.f_back
    return False
