"""Workers that are threads of one process, for tests of what workers tell each other."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Any

from replicax.workers.exchange import DEFAULT_TIMEOUT, Cancelled, absent, never


class SimulatedWorkers:
    """One worker of several that are threads; see :class:`replicax.workers.exchange.Workers`.

    ``SimulatedWorkers.of(3)`` makes three that know each other, and ``run`` calls a function as each of them.
    """

    liveness = None  # threads of one process

    def __init__(self, index: int, count: int, board: _Board) -> None:
        self.index = index
        self.count = count
        self.board = board

    @classmethod
    def of(cls, count: int) -> list[SimulatedWorkers]:
        board = _Board()
        return [cls(index, count, board) for index in range(count)]

    def exchange(
        self, topic: str, data: bytes, timeout: float = DEFAULT_TIMEOUT, is_cancelled: Callable[[], bool] = never
    ) -> list[bytes]:
        return self.board.exchange(topic, data, timeout, is_cancelled, self.index, self.count)


class _Board:
    """What lies between the workers; ``topics`` holds exchanges that not everybody has read."""

    def __init__(self) -> None:
        self.topics: dict[str, dict[int, bytes]] = {}
        self._read: dict[str, int] = {}
        self.broken = False
        self._gave_up: dict[str, int] = {}
        self._changed = threading.Condition()

    def exchange(
        self, topic: str, data: bytes, timeout: float, is_cancelled: Callable[[], bool], index: int, count: int
    ) -> list[bytes]:
        assert isinstance(data, bytes), type(data)
        deadline = time.monotonic() + timeout
        with self._changed:
            brought = self.topics.setdefault(topic, {})
            if index in brought:
                raise AssertionError(f"worker {index} comes to {topic!r} twice")
            brought[index] = data
            self._changed.notify_all()
            while len(brought) < count:
                if is_cancelled() or self.broken:
                    raise Cancelled
                self._changed.wait(max(0.0, min(0.05, deadline - time.monotonic())))
                if time.monotonic() > deadline and len(brought) < count:
                    missing = [w for w in range(count) if w not in brought]
                    self._gave_up.setdefault(topic, index)
                    raise TimeoutError(absent(topic, timeout, missing, count))
            if topic in self._gave_up:
                raise TimeoutError(f"{topic}: worker {index} came too late, when worker {self._gave_up[topic]} gave up")
            self._read[topic] = self._read.get(topic, 0) + 1
            if self._read[topic] == count:
                del self.topics[topic], self._read[topic]
            return [brought[w] for w in range(count)]


def run(workers: list[SimulatedWorkers], fn: Callable[[SimulatedWorkers], Any], timeout: float = 60.0) -> list[Any]:
    """``fn`` of each worker, at the same time; what each returned. The first error, if there is one, is raised."""
    with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
        futures = [pool.submit(fn, worker) for worker in workers]
        done, _ = concurrent.futures.wait(futures, timeout, concurrent.futures.FIRST_EXCEPTION)
        if any(future.exception() for future in done):
            workers[0].board.broken = True  # nobody needs to wait for those who have failed
        for future in done:
            future.result()
        return [future.result(timeout) for future in futures]
