"""The processes of ``test_deaths.py``, which are killed."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings

from replicax.workers.peer_death import Home, PeerDeathWatch


def work(home: str) -> None:
    """A worker, with a child that outlives it, as a loader of data may."""
    watch = PeerDeathWatch(2, "127.0.0.1", lambda: Home(*json.loads(home)))
    watch.wait(0.0)
    warnings.simplefilter("ignore")  # JAX's: of forking
    child = os.fork()
    if not child:
        print("child", os.getpid(), flush=True)
    time.sleep(600)


def lead() -> None:
    chief = PeerDeathWatch(0, "127.0.0.1", lambda: None)
    assert chief.home is not None
    print(json.dumps([chief.home.port, chief.home.secret, chief.home.process]), flush=True)
    while True:
        chief.wait(60)


if __name__ == "__main__":
    work(sys.argv[1]) if len(sys.argv) > 1 else lead()
