"""Datasets that several tests use."""

from __future__ import annotations

import threading
import time

import numpy as np


class Slow:
    """Batches that count how many were made, and remember the thread that made them."""

    def __init__(self, count=10) -> None:
        self.count = count
        self.made = 0
        self.threads = set()

    def __iter__(self):
        for i in range(self.count):
            self.made += 1
            self.threads.add(threading.current_thread())
            yield np.full(4, float(i))


class Stream:
    """Batches whose number nobody knows beforehand; of exceptions each is raised."""

    def __init__(self, batches) -> None:
        self.batches = batches
        self.made = 0
        self.allowed = None
        """If it is a semaphore, each batch takes one of it."""

    def __iter__(self):
        self.made = 0
        for batch in self.batches:
            if self.allowed is not None:
                assert self.allowed.acquire(timeout=20)
            self.made += 1
            if isinstance(batch, Exception):
                raise batch
            yield batch


def wait_until(condition) -> None:
    """Until it holds; a test fails that it never holds in."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def numbered(count: int, size: int = 2) -> list[np.ndarray]:
    return list(np.arange(count * size, dtype=np.int32).reshape(count, size))
