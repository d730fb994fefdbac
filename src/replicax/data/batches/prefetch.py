"""Prefetching: a thread that makes the elements of a pass in advance."""

from __future__ import annotations

import atexit
import collections
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from replicax.execution.signals import hold_signals
from replicax.workers import heartbeat
from replicax.workers.heartbeat_page import Phase

if TYPE_CHECKING:
    from types import TracebackType

_PATIENCE = 1.0
"""How many seconds ``close`` waits for a source that is being read; the thread ends when the source returns."""
_PATIENCE_WITH_JAX = 30.0
"""The same while an element is put on the devices: a process that ends while a thread is in JAX may crash."""
_PATIENCE_AT_EXIT = 10.0
"""How many seconds the end of the process waits for sources that are being closed, as for Grain's reading processes."""
_LOOK = 0.2
"""Seconds between two calls of a function that may end a wait for an item."""


_releasing: set[threading.Thread] = set()
"""Threads that close their source. No ``WeakSet``: one that grows while it is listed raises."""


@atexit.register
def _await_releases() -> None:
    """Wait for :data:`_releasing`: exit handlers of a source, as of Grain, would close it a second time meanwhile."""
    end = time.monotonic() + _PATIENCE_AT_EXIT
    for thread in list(_releasing):
        thread.join(max(0.0, end - time.monotonic()))


class PassStage(Protocol):
    """A stage of a pass: makes items from those of the stage before it."""

    is_placing: bool  # whether it is putting something on the devices

    def __next__(self) -> Any:
        """The next item."""

    def state(self) -> bytes:
        """The place of the pass, pickled: after the last returned item."""

    def cancel(self) -> None:
        """Cancel the item in progress, and all waits. Called from any thread."""

    def close(self) -> None:
        """Close what it reads."""


class Prefetcher:
    """Makes the items of a stage in a thread, ``depth`` of them ahead; with 0 in the caller.

    Grain reads ahead, too, but closing its iterators waits for the source, even for ever; a thread that waits for an
    element does not wake up; and an error that is not an ``Exception`` gets lost.

    A pass that has failed stays failed, as going on might leave elements out: ``next`` raises the same error again.

    From the first ``next`` on only the thread uses the ``stage``, which is closed with this object. The items that wait
    have at most ``most_bytes`` together, if that is given; one item of any size may always wait.
    """

    def __init__(self, stage: PassStage, depth: int, most_bytes: int | None = None) -> None:
        self._stage: PassStage | None = stage
        self._depth = depth
        self._most_bytes = most_bytes
        self._state = stage.state()
        self._ready: collections.deque[tuple[Any, bytes]] = collections.deque()
        # An RLock: the garbage collector may close a dropped iterator on any thread, including this object's.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_over = False
        self._error: tuple[BaseException, TracebackType | None] | None = None
        self._closed = False

    def __next__(self) -> Any:
        return self.next(None)

    def next(self, on_wait: Callable[[], None] | None) -> Any:
        """The next item. While it waits it calls ``on_wait`` now and then; if that raises, the item comes next time."""
        with self._changed:
            if heartbeat.current is None:  # each batch comes this way: a block that does nothing takes a microsecond
                self._await(on_wait)
            else:
                with heartbeat.phase(Phase.INPUT):
                    self._await(on_wait)
            if self._closed:
                raise ValueError("the iterator has been closed: iter(dataset) makes another one")
            if self._ready:
                self._changed.notify_all()  # first, or an interrupt in between would leave the thread asleep
                element, self._state = self._ready.popleft()
                return element
            if self._error is not None:
                error, traceback = self._error
                raise error.with_traceback(traceback)
        raise StopIteration

    def state(self) -> bytes:
        """The place of the pass, pickled: after the last returned item."""
        return self._state

    def waiting(self, least: int) -> list[Any]:
        """All items that are there already. With ``least=1`` it waits for one first.

        It returns none at the end, before an error, and when closed.
        """
        with self._changed:
            if least:
                self._await(None)
            return [made for made, _ in self._ready]

    def _await(self, on_wait: Callable[[], None] | None) -> None:
        """Wait until an item is ready, or no more will come."""
        if self._depth and self._thread is None and not self._closed:
            thread = threading.Thread(target=self._work, name="replicax-input", daemon=True)
            release = hold_signals()
            try:
                thread.start()
                self._thread = thread  # only now: one that can't start would be waited for
            finally:
                release()
        if self._thread is not None:
            look = None if on_wait is None else _LOOK
            while not self._changed.wait_for(lambda: self._ready or self._is_over or self._closed, look):
                assert on_wait is not None
                on_wait()
        elif not (self._ready or self._is_over or self._closed):
            self._make()

    def _work(self) -> None:
        try:
            while self._has_room():
                self._make()
        finally:
            _releasing.add(threading.current_thread())
            try:
                self._release()
            finally:
                _releasing.discard(threading.current_thread())

    def _has_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_hungry() or self._closed)
            return not (self._closed or self._is_over)

    def _is_hungry(self) -> bool:
        """Return whether one more item may wait."""
        most = self._most_bytes
        return len(self._ready) < self._depth and (most is None or sum(made.nbytes for made, _ in self._ready) < most)

    def _make(self) -> None:
        """Make one more item, or note the end."""
        assert self._stage is not None
        made = None
        try:
            made = next(self._stage), self._stage.state()
        except StopIteration:
            pass
        except BaseException as error:
            self._error = error, error.__traceback__
        with self._changed:
            if made is None:
                self._is_over = True
            elif not self._closed:
                self._ready.append(made)
            self._changed.notify_all()

    def _release(self) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.close()

    def cancel(self) -> None:
        """Wake threads that wait for ours; without ours, the caller waits for the source, which can't be cancelled."""
        if self._depth:  # even if the thread has not started: then it never will
            self._give_up()

    def close(self) -> None:
        """Free the waiting items, and end the thread: now, or as soon as the source returns."""
        stage, thread = self._stage, self._thread
        if stage is not None:
            stage.cancel()
        self._give_up()
        if thread is None:
            self._release()
        elif thread is not threading.current_thread():
            thread.join(_PATIENCE)
            if stage is not None and stage.is_placing:
                thread.join(_PATIENCE_WITH_JAX)

    def _give_up(self) -> None:
        with self._changed:
            self._changed.notify_all()
            self._closed = True
            self._ready.clear()
