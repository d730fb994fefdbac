"""Reading ahead: a thread that makes the elements of a pass before they are asked for."""

from __future__ import annotations

import collections
import threading
from typing import TYPE_CHECKING, Any, Protocol

from replicax.workers import heartbeat, heartbeat_page

if TYPE_CHECKING:
    from types import TracebackType

_PATIENCE = 1.0
"""How many seconds closing waits for a source that is just being read; the thread ends when the source lets it."""
_PATIENCE_WITH_JAX = 30.0
"""And how many while an element is put on the devices: a process that ends while a thread is in JAX may crash."""


class PassStage(Protocol):
    """A stage of a pass, which makes one thing after the other out of what the stage before it has made.

    Attributes:
      is_placing: whether it puts something on the devices just now.
    """

    is_placing: bool

    def __next__(self) -> Any:
        """The next one.

        Raises:
          StopIteration: there is none.
          Exception: whatever the dataset raised.
        """

    def state(self) -> bytes:
        """Where the pass is, pickled: after what was given last."""

    def call_off(self) -> None:
        """What is being made is not wanted any more, and there is nothing to wait for. Called from any thread."""

    def close(self) -> None:
        """End what it reads."""


class Prefetcher:
    """What a stage makes, made by a thread, ``depth`` of them ahead; with 0 made by the caller.

    Grain reads ahead too, but closing its iterators waits for the source, be it for ever; a thread that waits for an
    element goes on waiting; and an error that is no ``Exception`` never arrives.

    A pass that has failed stays failed, as nobody knows what it would leave out: ``next`` raises the same error again.

    Args:
      stage: what makes them. It is the thread's from the first ``next`` on, and closed with it.
      depth: how many may wait.
      most_bytes: how many bytes these may have together, if that matters; one of any size may always wait.
    """

    def __init__(self, stage: PassStage, depth: int, most_bytes: int | None = None) -> None:
        self._stage: PassStage | None = stage
        self._depth = depth
        self._most_bytes = most_bytes
        self._state = stage.state()
        self._ready: collections.deque[tuple[Any, bytes]] = collections.deque()
        # An RLock: a dropped iterator is closed by whichever thread the garbage collector runs on, also by ours.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_over = False
        self._error: tuple[BaseException, TracebackType | None] | None = None
        self._closed = False

    def __next__(self) -> Any:
        with self._changed:
            if heartbeat.current is None:
                self._await()
            else:
                with heartbeat.phase(heartbeat_page.INPUT):
                    self._await()
            if self._closed:
                raise ValueError("the iterator has been closed: iter(dataset) makes another one")
            if self._ready:
                element, self._state = self._ready.popleft()
                self._changed.notify_all()
                return element
            if self._error is not None:
                error, traceback = self._error
                raise error.with_traceback(traceback)
        raise StopIteration

    def state(self) -> bytes:
        """Where the pass is, pickled: after what was given last."""
        return self._state

    def waiting(self, least: int) -> list[Any]:
        """All that could be given without waiting.

        Args:
          least: for how many to wait, 0 or 1; there are fewer if there is none, an error comes next, or it was closed.
        """
        with self._changed:
            if least:
                self._await()
            return [made for made, _ in self._ready]

    def _await(self) -> None:
        """Until something is ready, or nothing comes any more."""
        if self._depth and self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._work, name="replicax-input", daemon=True)
            self._thread.start()
        if self._thread is not None:
            self._changed.wait_for(lambda: self._ready or self._is_over or self._closed)
        elif not (self._ready or self._is_over or self._closed):
            self._make()

    def _work(self) -> None:
        try:
            while self._has_room():
                self._make()
        finally:
            self._release()

    def _has_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_hungry() or self._closed)
            return not (self._closed or self._is_over)

    def _is_hungry(self) -> bool:
        """Whether one more may wait."""
        if len(self._ready) >= self._depth or not self._ready or self._most_bytes is None:
            return len(self._ready) < self._depth
        return sum(made.nbytes for made, _ in self._ready) < self._most_bytes

    def _make(self) -> None:
        """One more, or the end."""
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

    def call_off(self) -> None:
        """Wake whoever waits for the thread; without one, who reads waits for the source, which can't be called off."""
        if self._depth:  # also if the thread is yet to be started: then it is not
            self._give_up()

    def close(self) -> None:
        """Let go of what waits, and end the thread: now, or as soon as the source lets it."""
        stage, thread = self._stage, self._thread
        if stage is not None:
            stage.call_off()
        self._give_up()
        if thread is None:
            self._release()
        elif thread is not threading.current_thread():
            thread.join(_PATIENCE)
            if stage is not None and stage.is_placing:
                thread.join(_PATIENCE_WITH_JAX)

    def _give_up(self) -> None:
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
