"""The step timer: a thread that looks how far the devices are, and how long they wait for the host between two steps.

Workers that meet in each step take equally long for it, however slow one of them is. What tells the slow one is that
the others wait for it, and it for nobody. Inside of a program that can't be seen from the host. But three things can:

- the *gap*: from the end of a program until the host launches the next one. While it lasts this worker's devices have
  nothing to do, and the others' devices, whose programs are launched, wait in their first collective. A host that is
  ahead of its devices, as it usually is, has no gap.
- the *host's* time, from when it has launched a program, or has waited for the end of one, until it launches the next.
  Where all hosts take long, one of them may always come last, and is no slower than the others.
- on CPUs, for how many seconds the processors have worked on a program. To wait for another worker takes none.

When a program is launched is known exactly, and so is its end, if it has ended when its launch returns. Otherwise the
thread looks for the end: seldom at first, and then more often, the nearer it must be. So a few looks are enough for a
step, and of steps from some milliseconds on all are seen; of quicker ones as many as a fixed number of looks is enough
for, as more would cost more than the answer is worth.
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
"""Seconds between two looks how far the devices are."""
STALLED = 2.0
"""After how many seconds without a sign of progress it is looked for threads in host callbacks."""
LOOKS = 20
"""How often it is looked for the ends of programs in between, at most."""
QUICKEST, SLOWEST = 1e-3, 0.05
"""Seconds between two of these looks, when a program is about to end: at least, and at most."""
_REMEMBERED = 64
_MANY = 4 * _REMEMBERED
_DURATIONS = 15
_FIRST_GUESS = 0.02
_CALLING: Any = object()
_ENDED: Any = object()


class Pace:
    """How long a program takes.

    Attributes:
      watched: which of its results tells that it has ended; ``None``: it has none that is small.
      durations: of the last calls of programs with this name, in seconds: a step that is traced anew is the same step.
      calls: how many there were.
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
      launched_at: when.
      waited: for how many seconds the host had waited for input by then, in all.
      met: and for other workers.
      breaks: how many things other than steps it had done.
      output: what tells when it has ended.
      returned_at: when its launch had returned.
      ended_at: when it had ended, if that is known; 0 if not.
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
        """Its launch has returned ``output``, which tells when it has ended, unless it has already."""
        self.returned_at = time.monotonic()
        self.output = _ENDED if ended else output
        if self.has_ended():
            self.ended_at = self.returned_at

    def has_ended(self) -> bool | None:
        """Whether it has; ``None`` if that can't be told."""
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
    """The last calls, which one thread makes and another one looks at.

    Attributes:
      count: how many there were.
      thread: which thread makes them.
      inside: for how many seconds that has computed inside of launches: small programs are run there.
    """

    def __init__(self) -> None:
        self._last: collections.deque[Call] = collections.deque(maxlen=_REMEMBERED)
        self._durations: dict[tuple[str, int | None], collections.deque[float]] = {}
        self.count = 0
        self.thread = threading.main_thread().ident
        self.inside = self._began = 0.0
        self._is_inside = False  # the last one was

    def new_pace(self, name: str, steps: int | None) -> Pace:
        """Of a program that is new; how long those of its name take is known."""
        return Pace(self._durations.setdefault((name, steps), collections.deque(maxlen=_DURATIONS)))

    def begin(self, pace: Pace, now: float, waited: float, met: float, breaks: int) -> None:
        """There is another call."""
        self.count += 1
        self._last.append(Call(self.count, pace, now, waited, met, breaks))
        if self._is_inside:
            self._began = time.thread_time()

    def returned(self, output: Any = None, ended: bool = False) -> None:
        """The launch of the last one has returned; see :meth:`Call.returned`."""
        call = self._last[-1]
        call.returned(output, ended)
        if self._is_inside:  # to ask for it always would cost more than all else
            self.inside += time.thread_time() - self._began
        self._is_inside = bool(call.ended_at)

    @property
    def newest(self) -> Call:
        """The last call."""
        return self._last[-1]

    def now(self) -> list[Call]:
        """All that are remembered."""
        return list(self._last)


class StepTimer:
    """What the thread does.

    Args:
      its_page: where it writes what it sees.
      calls: what it looks at.
      is_wanted: whether it is to go on.
    """

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
        """Begin."""
        self._thread = threading.Thread(target=self._run, name="replicax-step-timer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End: a thread that is inside of JAX when Python is gone takes the process along."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while self._is_wanted() and not self._stop.is_set():
            until = time.monotonic() + INTERVAL
            with contextlib.suppress(Exception):  # a page without news is judged by its age
                self.look()
                for _ in range(LOOKS):
                    pause = self.look_for_ends()
                    if time.monotonic() + pause >= until or self._stop.is_set():
                        break
                    time.sleep(pause)  # an event's wait would cost more
            self._stop.wait(max(0.01, until - time.monotonic()))

    def look_for_ends(self) -> float:
        """Record the steps that have ended; returns for how many seconds not to look again."""
        return self._steps.look(time.monotonic())

    def look(self) -> None:
        """Write down how far the devices are."""
        calls = self._calls.now()
        now = time.monotonic()
        if calls and self._first is None:
            self._first = calls[0]
        calls = [call for call in calls if call.number > self._finished]
        newest = next((i for i in range(len(calls) - 1, -1, -1) if calls[i].has_ended()), None)
        if calls and newest is None and not any(call.has_ended() is False for call in calls):
            newest = len(calls) - 1  # nothing of them is left to wait for
        if newest is not None:
            self._note_finished(calls[: newest + 1], now)
        seconds = self._seconds
        seconds[page.EXPECTED] = self._expected([call for call in calls if call.number > self._finished])
        since = max(seconds[page.PROGRESS], self._finished_at)
        self._numbers[page.CALLBACK] = now - since > STALLED and _is_in_a_callback()
        seconds[page.TICK] = now

    def _note_finished(self, ended: Sequence[Call], now: float) -> None:
        """These have ended, all but the last of them perhaps long ago."""
        each = (now - max(self._finished_at, ended[0].launched_at)) / (ended[-1].number - self._finished)
        for call in ended:
            call.pace.durations.append(max(each, 0.0))
            call.output = _ENDED
        self._finished, self._finished_at = ended[-1].number, now
        self._seconds[page.FINISHED_AT] = now
        self._seconds[page.USUAL] = statistics.median(call.pace.durations[-1] for call in ended)
        self._numbers[page.FINISHED] = self._finished

    def _expected(self, in_flight: Sequence[Call]) -> float:
        """After how many seconds, about, the first of these programs whose end can be seen has ended."""
        total = 0.0
        for call in in_flight:
            if call.pace.durations:
                total += statistics.median(call.pace.durations)
            elif self._first is not None and self._calls.count >= _MANY:
                # JAX lets no more than some tens be under way, so the others have ended.
                total += (in_flight[-1].launched_at - self._first.launched_at) / self._calls.count
            else:
                return page.UNKNOWN
            if call.has_ended() is not None:
                break
        return total


class StepWatch:
    """Looks for the ends of programs, and records each step between two of them.

    Args:
      its_page: into which it is recorded.
      calls: the programs.
    """

    def __init__(self, its_page: HeartbeatPage, calls: Calls) -> None:
        self._page, self._calls = its_page, calls
        self._next = 0  # the number of the first call of which nothing is recorded yet
        self._open: Call | None = None  # has not ended, when it was looked at last
        self._looked_at = 0.0
        self._is_awaited = False
        self._awaited: collections.deque[float] = collections.deque(maxlen=_REMEMBERED)  # until when the host waited
        self._last: tuple[Call, float] | None = None  # whose end is known, and the processors' time by then
        self._cpu: dict[int, float] = {}  # by the number of a call, when its end was seen
        self._periods: collections.deque[float] = collections.deque(maxlen=9)
        self._period = _FIRST_GUESS  # of the last ones, the median
        self._works: collections.deque[float] = collections.deque(maxlen=9)
        self._working = 0.0  # and for how long the devices work on one, at least

    def look(self, now: float) -> float:
        """See what has ended; returns for how many seconds not to look again."""
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
                # In the middle between what is known: neither too early nor too late, on average.
                since = self._looked_at if call is was_open else call.launched_at
                if now - since <= max(self._period / 4, 2 * QUICKEST):
                    call.ended_at = (since + now) / 2
                    call.was_awaited = call is was_open and self._is_awaited
        known = [call.number for call in calls if call.ended_at and call.number not in self._cpu]
        if known:
            self._cpu = {number: cpu for number, cpu in self._cpu.items() if number >= calls[0].number}
            self._cpu.update(dict.fromkeys(known, self._calls.inside + _processor_seconds()))

    def _record(self, call: Call, after: Call) -> None:
        """``call`` has ended, and the next one has been launched: that is a step, from the end that is known before."""
        last, self._last = self._last, None
        cpu = self._cpu.get(call.number)
        if call.was_awaited:
            self._awaited.append(call.ended_at)
        if not call.ended_at or cpu is None:
            self._last = last  # it was too quick to be seen: the step goes on
            return
        if call.breaks == after.breaks:
            self._last = call, cpu
        if last is None or last[0].breaks != call.breaks or self._last is None:
            return
        before, cpu_before = last
        number = call.number - before.number
        met = after.met - call.met
        gap = max(0.0, after.launched_at - met - call.ended_at)
        # A host that is ahead waits for another program than the one that it has launched last.
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
    """How many seconds to let pass between two looks at a step that takes ``period`` and is about to end.

    >>> from replicax.workers.step_timer import look_interval
    >>> look_interval(0.001), look_interval(0.12), look_interval(10.0)
    (0.001, 0.01, 0.05)
    """
    return min(SLOWEST, max(QUICKEST, period / 12))


def _processor_seconds() -> float:
    """For how many seconds the threads of this process have had a processor, but for those of Python.

    What Python does between two steps is in the gap already, and what it does beside them, such as reading ahead or
    writing a checkpoint, nobody waits for.
    """
    seconds = time.process_time()
    for thread in threading.enumerate():
        if thread.native_id is not None:
            with contextlib.suppress(OSError):  # it has just ended
                seconds -= time.clock_gettime(_clock_of(thread.native_id))
    return seconds


def _is_in_jax(thread: int | None) -> bool:
    """Whether a thread runs JAX's Python: one that has launched a program then most probably waits for its end."""
    frame = sys._current_frames().get(thread or 0)
    return frame is not None and _jax.is_of_jax(frame.f_code)


def _clock_of(thread: int) -> int:
    """The clock of a thread's time on processors, by the number that the kernel gives it.

    Asking for it with ``time.pthread_getcpuclockid`` would be undefined for a thread that has ended.
    """
    return (~thread << 3) | 6  # CPUCLOCK_PERTHREAD_MASK, CPUCLOCK_SCHED: part of the kernel's ABI


def _is_in_a_callback() -> bool:
    """Whether a thread is in Python that a program has called."""
    for found in sys._current_frames().values():
        frame: FrameType | None = found
        while frame is not None:
            if _jax.is_host_callback(frame.f_code):
                return True
            frame = frame.f_back
    return False
