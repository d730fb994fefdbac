"""What reads for an iterator: in the background, one element at a time or several together."""

from __future__ import annotations

import collections
import pickle
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from replicax.data.elements.chunks import Chunk, joined_where_alike
from replicax.execution.many_steps.element_groups import ElementGroup, Single, group_of

if TYPE_CHECKING:
    from types import TracebackType

    from replicax.data.elements.elements import Elements
    from replicax.workers.replicas import Replicas

_PATIENCE = 1.0
"""How many seconds closing waits for a source that is just being read; the thread ends when the source lets it."""
_PATIENCE_WITH_JAX = 30.0
"""And how many while an element is put on the devices: a process that ends while a thread is in JAX may crash."""


class PassReader:
    """A pass that is going on.

    Args:
      elements: what it reads.
      ahead: how many elements, or groups of them, wait on the devices.
      owner: the replicas that the elements are for.
    """

    def __init__(self, elements: Elements, ahead: int, owner: Replicas | None) -> None:
        self._elements = elements
        self._prefetcher = Prefetcher(elements, ahead)
        self._owner = owner
        # Elements that were read together and are not all given yet; and the state after the last one that was.
        self._left: collections.deque[Chunk] = collections.deque()
        self._state: bytes | None = None

    def next(self) -> Any:
        """The next element.

        Raises:
          StopIteration: there is none.
          Exception: whatever the dataset raised.
        """
        if not self._left:
            element = next(self._prefetcher)
            if not isinstance(element, Chunk):
                self._state = None
                return element
            self._left.append(element)
        chunk = self._first(1)
        self._state = chunk.states[-1]
        return chunk.group.elements()[0]

    def take(self, steps: int, staged: bool) -> tuple[list[Chunk], Exception | None]:
        """The next elements, and what is wrong with the one after them if an error stands there.

        Args:
          steps: how many; fewer if there are no more.
          staged: whether to read so many together from now on.

        Raises:
          StopIteration, Exception: as :meth:`next`, if there is no element before.
        """
        if staged:
            self._elements.steps = steps
        chunks: list[Chunk] = []
        while steps:
            try:
                if not self._left:
                    self._left.append(self._received(staged))
            except Exception as error:
                if not chunks:
                    raise
                return chunks, None if isinstance(error, StopIteration) else error
            chunks.append(self._first(steps))
            self._state = chunks[-1].states[-1]
            steps -= chunks[-1].group.count
        return chunks, None

    def give_back(self, chunks: Sequence[Chunk]) -> None:
        """These, the last of what was given, come next again."""
        if chunks:
            self._left.extendleft(reversed(chunks))
            self._state = chunks[0].states[0]

    def get_state(self) -> Any:
        """The state after the element that was given last."""
        return pickle.loads(self._prefetcher.state if self._state is None else self._state)

    def end(self) -> None:
        """End the threads, and let go of what they have read."""
        self._prefetcher.close()
        self._left.clear()

    def _received(self, staged: bool) -> Chunk:
        before = self._prefetcher.state
        element = next(self._prefetcher)
        if isinstance(element, Chunk):
            return element
        assert self._owner is not None
        group = group_of(element, self._owner.mesh) if staged else Single(element)
        return Chunk(group, [before, self._prefetcher.state])

    def _first(self, most: int) -> Chunk:
        chunk = self._left.popleft()
        if chunk.group.count > most:
            chunk, rest = chunk.split(most)
            self._left.appendleft(rest)
        return chunk


class IteratorSource:
    """The elements of a pass, for one call of ``run_steps``.

    Args:
      reader: of the pass.
    """

    def __init__(self, reader: PassReader) -> None:
        self._reader = reader
        self._chunks: list[Chunk] = []

    def take(self, steps: int, staged: bool) -> tuple[list[ElementGroup | Single], Exception | None]:
        """See :class:`replicax.execution.many_steps.loop.StepSource`."""
        chunks, error = self._reader.take(steps, staged)
        self._chunks = joined_where_alike(chunks)
        return [chunk.group for chunk in self._chunks], error

    def give_back(self, groups: Sequence[ElementGroup | Single]) -> None:
        """See :class:`replicax.execution.many_steps.loop.StepSource`."""
        left = sum(group.count for group in groups)
        back: collections.deque[Chunk] = collections.deque()
        for chunk in reversed(self._chunks):
            if left <= 0:
                break
            if left < chunk.group.count:
                chunk = chunk.split(chunk.group.count - left)[1]
            left -= chunk.group.count
            back.appendleft(chunk)
        self._reader.give_back(back)


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
            if self._thread is not None:
                self._changed.wait_for(lambda: self._ready or self._is_over or self._closed)
            elif not (self._is_over or self._closed):
                self._make()
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
