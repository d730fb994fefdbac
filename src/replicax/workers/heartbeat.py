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
import functools
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec, TypeVar

from replicax import _jax
from replicax.workers import heartbeat_page as page
from replicax.workers.heartbeat_page import HeartbeatPage, claimed_page
from replicax.workers.step_timer import Calls, Pace, StepTimer

_SMALL = 4096
"""A result of at most this many bytes is kept to see when its program has ended."""
_BREAKS = (page.COMPILE, page.EVALUATION, page.SAVING, page.RESTORING, page.EXACT, page.PAUSED)
Args = ParamSpec("Args")
Result = TypeVar("Result")


class Heartbeat:
    """Writes this worker's progress into its page."""

    def __init__(self, its_page: HeartbeatPage) -> None:
        self._page = its_page
        self._numbers, self._seconds = its_page.numbers, its_page.seconds
        self._calls = Calls()
        self.timer = StepTimer(its_page, self._calls, lambda: current is self)
        self._runs: collections.Counter[str] = collections.Counter()
        self._name = ""
        self._waited = self._met = self._switched_at = 0.0
        self._breaks = 0
        self._compilations = 0
        self._before_compiling = page.START

    def begin(self) -> None:
        """Tell the launcher that this process has the page, and start the step timer."""
        numbers = self._numbers
        numbers[page.PHASE], numbers[page.STEP] = page.START, -1
        numbers[page.THREAD] = os.getpid()
        self._seconds[page.PROGRESS] = self._seconds[page.TICK] = time.monotonic()
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # standard error may be closed
            asked = int(signal.SIGRTMAX) - 3  # most probably unused by others
            faulthandler.register(asked, file=2, all_threads=True)
            numbers[page.SIGNAL] = asked
        _jax.on_compilations(self._compiling, self._compiled)
        os.register_at_fork(after_in_child=_forget)
        atexit.register(self._end)
        self.timer.start()
        numbers[page.PID] = os.getpid()  # last: it marks the rest as valid

    # --- called by the thread that trains -------------------------------------------------------------------

    def launching(self, pace: Pace | None, name: str, steps: int | None) -> Pace:
        """A program is about to be launched.

        Args:
          pace: returned by this method for the same program before; ``None`` if it is new.
          name: of the program.
          steps: how many steps the program makes, if several.
        """
        now = time.monotonic()
        if pace is None:
            pace = self._calls.new_pace(name, steps)
        numbers = self._numbers
        if name != self._name:
            self._page.name = self._name = name
        self._runs[name] += steps or 1
        pace.calls += 1
        if pace.calls > numbers[page.CALLS]:
            numbers[page.CALLS] = pace.calls
        self._calls.begin(pace, now, self._waited, self._met, self._breaks)
        numbers[page.LAUNCHED], numbers[page.RUNS] = self._calls.count, self._runs[name]
        if (thread := threading.get_ident()) != self._calls.thread:
            self._calls.thread = thread
            numbers[page.THREAD] = threading.get_native_id()
        self._seconds[page.PROGRESS] = now
        if numbers[page.PHASE] == page.START:
            numbers[page.PHASE] = page.STEPS
        return pace

    def launched(self, returned: Sequence[tuple[Sequence[Any], Sequence[Any]]], ended: bool) -> None:
        """The program has been launched.

        Args:
          returned: the arrays that it writes, and its results; empty if the launch failed.
          ended: whether the caller waited for its end.
        """
        if ended or not returned:
            self._calls.returned(ended=ended)
            return
        pace = self._calls.newest.pace
        written, results = returned[0]
        if pace.watched is None:
            small = [i for i, array in enumerate(results) if array.nbytes <= _SMALL]
            pace.watched = small[0] if small else -1
            some = results or written
            self._numbers[page.ON_CPU] = bool(some) and _jax.is_on_cpu(some[0])
        if 0 <= pace.watched < len(results):
            self._calls.returned(results[pace.watched])
        else:
            some = results or written
            self._calls.returned(weakref.ref(some[0]) if some else None)

    def is_of_this_thread(self) -> bool:
        """Whether this is the thread that trains: the last one that launched a program, or the main thread."""
        return threading.get_ident() == self._calls.thread

    def made(self, step: int) -> None:
        """``step`` steps of the run have been launched."""
        self._numbers[page.STEP] = step

    def switch(self, phase: int) -> int:
        """Enter a phase; returns the one before."""
        numbers = self._numbers
        before = numbers[page.PHASE]
        numbers[page.PHASE] = phase
        if phase == page.START:
            numbers[page.STEP] = -1
        now = time.monotonic()
        if before == page.INPUT:
            self._waited += now - self._switched_at
        elif before == page.RENDEZVOUS:
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
        self.timer.stop()


# --- of this process ------------------------------------------------------------------------------------


current: Heartbeat | None = None
"""The heartbeat of this process, if the launcher started it."""


def _forget() -> None:
    """In a forked process, which is not the worker."""
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
    """``step`` steps of the run have been launched."""
    if current is not None:
        current.made(step)


def switch(number: int) -> None:
    """Enter a phase; see :func:`phase`."""
    if current is not None:
        current.switch(number)


def during(number: int) -> Callable[[Callable[Args, Result]], Callable[Args, Result]]:
    """Decorate a function: while it runs, the worker is in this phase; see :func:`phase`."""

    def decorate(fn: Callable[Args, Result]) -> Callable[Args, Result]:
        @functools.wraps(fn)
        def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
            with phase(number):
                return fn(*args, **kwargs)

        return call

    return decorate


def phase(number: int) -> AbstractContextManager[None]:
    """Enter one of the phases of :mod:`~replicax.workers.heartbeat_page` for a ``with`` block."""
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
    """Tell the launcher that no step comes for a while: it does not expect one inside the ``with`` block.

    ``replicax launch`` takes a worker for hung if it makes no step for 10 s and does not compute on its processor
    either (``--hang-timeout``). It knows that compilation, input, evaluation by steps, saving and restoring take long.
    Use this for anything else that waits for long between the steps of a run: for a network, a disk or another
    process. Other workers may wait for this one meanwhile. Without the launcher it does nothing.

    >>> import replicax
    >>> with replicax.paused():
    ...     pass  # upload samples, wait for a person, …
    """
    return phase(page.PAUSED)
