"""The heartbeat: what a worker lets the launcher know of itself, so that a watchdog outside can tell when it hangs.

Whoever launches a program writes down that it does, and what else may take long says so (:func:`phase`). A thread, the
*pulse*, looks four times a second how far the devices are. All of it is numbers in a page of memory that the launcher
reads (:mod:`~replicax.workers.heartbeat_page`); what they mean is for the launcher to judge
(:mod:`replicax.launcher.watchdog`). Without the launcher there is no page, and nothing is written.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import faulthandler
import functools
import os
import signal
import statistics
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from replicax import _jax
from replicax.workers import heartbeat_page as page
from replicax.workers.heartbeat_page import HeartbeatPage, claimed_page
from replicax.workers.step_samples import LOOKS, StepSamples, look_interval

INTERVAL = 0.25
"""Seconds between two looks of the pulse."""
STALLED = 2.0
"""After how many seconds without a sign of progress it is looked for threads in host callbacks."""
_SMALL = 4096
"""How many bytes a result has at most that is kept to see when its program has ended."""
_REMEMBERED = 64
_DURATIONS = 15
_MANY = 4 * _REMEMBERED
_BREAKS = (page.COMPILE, page.EVALUATION, page.SAVING, page.RESTORING, page.EXACT, page.PAUSED)
_CALLING: Any = object()
_ENDED: Any = object()

Args = ParamSpec("Args")
Result = TypeVar("Result")


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


class _Call:
    """A call of a program.

    Attributes:
      number: among all calls.
      pace: of the program.
      launched_at: when.
      waited: for how many seconds the host had waited for input by then, in all.
      met: and for other workers.
      output: what tells when it has ended.
    """

    __slots__ = ("launched_at", "met", "number", "output", "pace", "waited")

    def __init__(self, number: int, pace: Pace, launched_at: float, waited: float, met: float) -> None:
        self.number, self.pace, self.launched_at, self.waited, self.met = number, pace, launched_at, waited, met
        self.output: Any = _CALLING

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


class Heartbeat:
    """What this worker writes into its page.

    Args:
      its_page: the page.
    """

    def __init__(self, its_page: HeartbeatPage) -> None:
        self._page = its_page
        self._numbers, self._seconds = its_page.numbers, its_page.seconds
        self._calls: collections.deque[_Call] = collections.deque(maxlen=_REMEMBERED)
        self._runs: collections.Counter[str] = collections.Counter()
        self._durations: dict[tuple[str, int | None], collections.deque[float]] = {}
        self._launched = 0
        self._finished = 0
        self._first_at = self._launched_at = 0.0
        self._finished_at = 0.0
        self._name = ""
        self._waited = self._met = self._switched_at = 0.0
        self._breaks = 0
        self._newest: int | None = None  # the last call at the look before, if that was just now
        self._samples = StepSamples()
        self._seen: tuple[_Call, float, int] | None = None  # has ended, when, and how many breaks there were by then
        self._compilations = 0
        self._before_compiling = page.START
        self._thread = threading.main_thread().ident

    def begin(self) -> None:
        """Tell the launcher that this process has the page, and start the pulse."""
        numbers = self._numbers
        numbers[page.PHASE], numbers[page.STEP] = page.START, -1
        numbers[page.THREAD] = os.getpid()
        self._seconds[page.PROGRESS] = self._seconds[page.TICK] = time.monotonic()
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # somebody may have closed standard error
            asked = int(signal.SIGRTMAX) - 3  # nobody else's, as far as one can know
            faulthandler.register(asked, file=2, all_threads=True)
            numbers[page.SIGNAL] = asked
        _jax.on_compilations(self._compiling, self._compiled)
        os.register_at_fork(after_in_child=_forget)
        atexit.register(self._end)
        threading.Thread(target=self._pulse, name="replicax-pulse", daemon=True).start()
        numbers[page.PID] = os.getpid()  # last: from now on the rest holds

    # --- what the thread that trains says -------------------------------------------------------------------

    def launching(self, pace: Pace | None, name: str, steps: int | None) -> Pace:
        """A program is about to be launched.

        Args:
          pace: what this returned for the program before; ``None`` if it is new.
          name: of the program.
          steps: how many it makes, if several.
        """
        now = time.monotonic()
        if pace is None:
            pace = Pace(self._durations.setdefault((name, steps), collections.deque(maxlen=_DURATIONS)))
            self._first_at = self._first_at or now
        numbers = self._numbers
        if name != self._name:
            self._page.name = self._name = name
        self._runs[name] += steps or 1
        pace.calls += 1
        if pace.calls > numbers[page.CALLS]:
            numbers[page.CALLS] = pace.calls
        self._launched_at = now
        self._launched += 1
        self._calls.append(_Call(self._launched, pace, now, self._waited, self._met))
        numbers[page.LAUNCHED], numbers[page.RUNS] = self._launched, self._runs[name]
        if (thread := threading.get_ident()) != self._thread:
            self._thread = thread
            numbers[page.THREAD] = threading.get_native_id()
        self._seconds[page.PROGRESS] = now
        if numbers[page.PHASE] == page.START:
            numbers[page.PHASE] = page.STEPS
        return pace

    def launched(self, returned: Sequence[tuple[Sequence[Any], Sequence[Any]]], ended: bool) -> None:
        """It has been launched.

        Args:
          returned: the arrays that it writes, and its results; empty if the launch has failed.
          ended: whether it was waited for.
        """
        call = self._calls[-1]
        if ended:
            call.output = _ENDED
            return
        if not returned:
            call.output = None
            return
        pace = call.pace
        written, results = returned[0]
        if pace.watched is None:
            small = [i for i, array in enumerate(results) if array.nbytes <= _SMALL]
            pace.watched = small[0] if small else -1
            some = results or written
            self._numbers[page.ON_CPU] = bool(some) and _jax.is_on_cpu(some[0])
        if 0 <= pace.watched < len(results):
            call.output = results[pace.watched]
        else:
            some = results or written
            call.output = weakref.ref(some[0]) if some else None

    def is_of_this_thread(self) -> bool:
        """Whether it is this thread that trains: the one that has launched a program last, or the main thread."""
        return threading.get_ident() == self._thread

    def made(self, step: int) -> None:
        """So many steps of the run have been launched."""
        self._numbers[page.STEP] = step

    def switch(self, phase: int) -> int:
        """What this worker is about from now on; returns what it was about until now."""
        numbers = self._numbers
        before = numbers[page.PHASE]
        numbers[page.PHASE] = phase
        if phase == page.START:
            numbers[page.STEP] = -1
        now = time.monotonic()
        if before == page.INPUT:
            self._waited += now - self._switched_at
        elif before == page.MEETING:
            self._met += now - self._switched_at
        self._switched_at = now
        if phase in _BREAKS:
            self._breaks += 1
        self._seconds[page.PROGRESS] = now
        return before

    def _compiling(self) -> None:
        if self.is_of_this_thread():
            if not self._compilations:
                self._before_compiling = self.switch(page.COMPILE)
            self._compilations += 1

    def _compiled(self) -> None:
        if self.is_of_this_thread() and self._compilations:
            self._compilations -= 1
            if not self._compilations:
                self.switch(self._before_compiling)

    def _end(self) -> None:
        self.switch(page.END)

    # --- the pulse ------------------------------------------------------------------------------------------

    def _pulse(self) -> None:
        while current is self:
            until = time.monotonic() + INTERVAL
            with contextlib.suppress(Exception):  # a page without news is judged by its age
                self._look()
                self._sample(until)
            time.sleep(max(0.01, until - time.monotonic()))

    def _look(self) -> None:
        calls = list(self._calls)
        now = time.monotonic()
        newest = next((i for i in range(len(calls) - 1, -1, -1) if calls[i].has_ended()), None)
        if calls and newest is None and not any(self._is_open(call) for call in calls):
            newest = len(calls) - 1  # nothing of them is left to wait for
        if newest is not None and calls[newest].number > self._finished:
            self._note_finished(calls[: newest + 1], now)
        seconds = self._seconds
        in_flight = [call for call in calls if call.number > self._finished]
        seconds[page.EXPECTED] = self._expected(in_flight)
        since = max(seconds[page.PROGRESS], self._finished_at)
        self._numbers[page.CALLBACK] = now - since > STALLED and _is_in_a_callback()
        seconds[page.TICK] = now

    def _sample(self, until: float) -> None:
        """Look closely at the end of a step, and at what comes then."""
        period = self._seconds[page.PERIOD]
        pause = look_interval(period)
        call: _Call | None = None
        for _ in range(LOOKS):
            now = time.monotonic()
            if now >= until or current is not self:
                return
            if self._seen is not None:
                if self._has_gone_on(*self._seen):
                    self._seen = None
                    if period < INTERVAL:
                        self._newest = None
                        return
            elif call is None:
                calls = list(self._calls)
                call = next((call for call in calls if call.has_ended() is False), None)
                if call is None and calls and self._newest is not None and calls[-1].number > self._newest:
                    call = calls[-1]  # it was launched since the look before, and has ended already
                    continue
            elif (ended := call.has_ended()) is not False:
                self._seen = (call, now, self._breaks) if ended else None
                call = None
            self._newest = self._launched
            time.sleep(pause)

    def _has_gone_on(self, call: _Call, ended_at: float, breaks: int) -> bool:
        """Whether the host has launched the call after one that has ended."""
        after = next((other for other in list(self._calls) if other.number == call.number + 1), None)
        if after is None:
            return self._launched > call.number + 1
        if breaks != self._breaks:
            self._samples.interrupted()
            return True
        samples, seconds = self._samples, self._seconds
        samples.add(call.number, ended_at, after.launched_at - (after.met - call.met), after.waited - call.waited)
        if samples.count:
            seconds[page.PERIOD], seconds[page.WAITED], seconds[page.WANTED] = samples.medians()
            seconds[page.GAP_LOW], seconds[page.GAP_HIGH] = samples.gaps()
            seconds[page.COMPUTED_LOW], seconds[page.COMPUTED_HIGH] = samples.computed()
            self._numbers[page.SAMPLES] = samples.count
        return True

    @staticmethod
    def _is_open(call: _Call) -> bool:
        return call.has_ended() is False

    def _note_finished(self, calls: Sequence[_Call], now: float) -> None:
        """These have ended, all but the first of them perhaps long ago."""
        ended = [call for call in calls if call.number > self._finished]
        each = (now - max(self._finished_at, ended[0].launched_at)) / (calls[-1].number - self._finished)
        for call in ended:
            call.pace.durations.append(max(each, 0.0))
            call.output = None
        self._finished, self._finished_at = calls[-1].number, now
        self._seconds[page.FINISHED_AT] = now
        self._seconds[page.USUAL] = statistics.median(call.pace.durations[-1] for call in ended)
        self._numbers[page.FINISHED] = self._finished

    def _expected(self, in_flight: Sequence[_Call]) -> float:
        """After how many seconds, about, the first of these programs whose end can be seen has ended."""
        total = 0.0
        for call in in_flight:
            if call.pace.durations:
                total += statistics.median(call.pace.durations)
            elif self._launched >= _MANY:  # JAX lets no more than some tens be under way, so the others have ended
                total += (self._launched_at - self._first_at) / self._launched
            else:
                return page.UNKNOWN
            if call.has_ended() is not None:
                break
        return total


def _is_in_a_callback() -> bool:
    """Whether a thread is in Python that a program has called."""
    for found in sys._current_frames().values():
        frame: FrameType | None = found
        while frame is not None:
            if _jax.is_host_callback(frame.f_code):
                return True
            frame = frame.f_back
    return False


# --- of this process ------------------------------------------------------------------------------------


current: Heartbeat | None = None
"""That of this process, under the launcher."""


def _forget() -> None:
    """In a process that was forked, which is not the worker."""
    global current
    current = None


def _begun() -> Heartbeat | None:
    its_page = claimed_page(os.environ[page.VARIABLE])
    if its_page is None:
        return None
    return Heartbeat(its_page)


if page.VARIABLE in os.environ:
    current = _begun()
    if current is not None:
        current.begin()


def made(step: int) -> None:
    """So many steps of the run have been launched."""
    if current is not None:
        current.made(step)


def switch(number: int) -> None:
    """What this worker is about from now on; see :func:`phase`."""
    if current is not None:
        current.switch(number)


def during(number: int) -> Callable[[Callable[Args, Result]], Callable[Args, Result]]:
    """A decorator: what this worker is about while a function runs; see :func:`phase`."""

    def decorate(fn: Callable[Args, Result]) -> Callable[Args, Result]:
        @functools.wraps(fn)
        def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
            with phase(number):
                return fn(*args, **kwargs)

        return call

    return decorate


def phase(number: int) -> AbstractContextManager[None]:
    """What this worker is about in a ``with`` block: one of the phases of :mod:`~replicax.workers.heartbeat_page`."""
    return contextlib.nullcontext() if current is None else _phase(current, number)


@contextmanager
def _phase(beat: Heartbeat, number: int) -> Iterator[None]:
    if not beat.is_of_this_thread():
        yield
        return
    before = beat.switch(number)
    try:
        yield
    finally:
        beat.switch(before)


def paused() -> AbstractContextManager[None]:
    """Do what may take long between two steps: in a ``with`` block of it the launcher does not expect any step.

    A worker under ``replicax launch`` that makes no step for 10 s, and doesn't compute on its processor either, is
    taken for one that hangs (``--hang-timeout``). Compilation, input, evaluation by steps, saving and restoring are
    known to take long. What else waits for long between the steps of a run, for a network, a disk or another process,
    says so with this. Others may wait for it meanwhile. Without the launcher it does nothing.

    >>> import replicax
    >>> with replicax.paused():
    ...     pass  # upload samples, wait for a person, …
    """
    return phase(page.PAUSED)
