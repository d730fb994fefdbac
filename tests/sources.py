"""Datasets that several tests use."""

from __future__ import annotations

import threading

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


def numbered(count: int, size: int = 2) -> list[np.ndarray]:
    return list(np.arange(count * size, dtype=np.int32).reshape(count, size))
