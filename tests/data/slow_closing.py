"""A program that ends while a source is still being closed, as one of Grain's reading processes."""

from __future__ import annotations

import time

from replicax.data.batches.prefetch import Prefetcher


class SlowToClose:
    """A stage whose end takes longer than closing waits for."""

    is_placing = False

    def __next__(self) -> int:
        return 1

    def state(self) -> bytes:
        return b""

    def cancel(self) -> None:
        pass

    def close(self) -> None:
        time.sleep(1.5)
        print("closed", flush=True)


items = Prefetcher(SlowToClose(), depth=2)
print(next(items), flush=True)
items.close()
