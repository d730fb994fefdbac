"""Reading ahead: a thread that makes the elements of a pass before they are asked for."""

from __future__ import annotations

import collections
import threading
from typing import TYPE_CHECKING, Any

from replicax.workers import heartbeat, heartbeat_page

if TYPE_CHECKING:
    from types import TracebackType

    from replicax.data.elements.elements import Elements

_PATIENCE = 1.0
"""How many seconds closing waits for a source that is just being read; the thread ends when the source lets it."""
_PATIENCE_WITH_JAX = 30.0
"""And how many while an element is put on the devices: a process that ends while a thread is in JAX may crash."""


class Prefetcher:
    """The elements of a pass, made by a thread, ``depth`` of them ahead; with 0 made by the caller.

    Grain reads ahead too, but closing its iterators waits for the source, be it for ever; a thread that waits for an
    element goes on waiting; and an error that is no ``Exception`` never arrives.

    A pass that has failed stays failed, as nobody knows what it would leave out: ``next`` raises the same error again.

    Args:
      elements: what makes them. It is the thread's from the first ``next`` on, and closed with it.
      depth: how many may wait.
    """

    def __init__(self, elements: Elements, depth: int) -> None:
        self._elements: Elements | None = elements
        self._depth = depth
        self.state = elements.state()
        """Where the pass is, pickled: after the element that was given last."""
        self._ready: collections.deque[tuple[Any, bytes]] = collections.deque()
        # An RLock: a dropped iterator is closed by whichever thread the garbage collector runs on, also by ours.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_over = False
        self._error: tuple[BaseException, TracebackType | None] | None = None
        self._closed = False

    def __next__(self) -> Any:
        with self._changed:
            if self._depth and self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._work, name="replicax-input", daemon=True)
                self._thread.start()
            if heartbeat.current is None:
                self._await()
            else:
                with heartbeat.phase(heartbeat_page.INPUT):
                    self._await()
            if self._closed:
                raise ValueError("the iterator has been closed: iter(dataset) makes another one")
            if self._ready:
                element, self.state = self._ready.popleft()
                self._changed.notify_all()
                return element
            if self._error is not None:
                error, traceback = self._error
                raise error.with_traceback(traceback)
        raise StopIteration

    def _await(self) -> None:
        """Until there is an element, or none comes any more."""
        if self._thread is not None:
            self._changed.wait_for(lambda: self._ready or self._is_over or self._closed)
        elif not (self._is_over or self._closed):
            self._make()

    def _work(self) -> None:
        try:
            while self._has_room():
                self._make()
        finally:
            self._release()

    def _has_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) < self._depth or self._closed)
            return not (self._closed or self._is_over)

    def _make(self) -> None:
        """One more element, or the end."""
        assert self._elements is not None
        made = None
        try:
            made = next(self._elements), self._elements.state()
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
        elements, self._elements = self._elements, None
        if elements is not None:
            elements.close()

    def close(self) -> None:
        """Let go of what waits, and end the thread: now, or as soon as the source lets it."""
        elements, thread = self._elements, self._thread
        if elements is not None:
            elements.closing = True
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if thread is None:
            self._release()
        elif thread is not threading.current_thread():
            thread.join(_PATIENCE)
            if elements is not None and elements.is_placing:
                thread.join(_PATIENCE_WITH_JAX)
