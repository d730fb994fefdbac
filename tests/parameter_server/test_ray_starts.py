"""Starting Ray: what a start in vain has begun is ended, and nothing else is."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import pytest

from replicax.parameter_server import actors

pytest.importorskip("ray")


def test_a_start_in_vain_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def begin(name: str) -> None:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", name]))

    def init(**_: Any) -> None:
        begin("ray::Agent")
        begin("another")
        raise ValueError("it took too long")

    monkeypatch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", None)  # restored afterwards
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    try:
        with pytest.raises(RuntimeError, match="in 3 attempts: it took too long"):
            actors._start(types.SimpleNamespace(init=init, shutdown=lambda: None))
        assert [process.wait(100) for process in started[::2]] == [-9] * 3
        assert [process.poll() for process in started[1::2]] == [None] * 3
    finally:
        for process in started:
            process.kill()
            process.wait()
