"""XLA's lines of absent drivers are left out, and what else is written to standard error is not lost."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys

import pytest

from replicax.system.driver_lines import without_driver_lines

PROGRAM = """
import importlib.util, os, sys
from replicax.system.driver_lines import without_driver_lines

importlib.util.find_spec = lambda name: name  # as if the code for GPUs were installed
if sys.argv[1] == "without grep":
    os.environ["PATH"] = ""
print("before", file=sys.stderr)
with without_driver_lines():
    for line in (
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        "I0000 00:00:1795732505.783078   12188 cudart_stub.cc:31] Could not find cuda drivers on your machine",
        "F0000 00:00:1795732505.783078   12188 executor.cc:7] Check failed: no cuda drivers",
    ):
        os.write(2, f"{line}\\n".encode())
    print("from Python", file=sys.stderr)
    if sys.argv[1] == "aborts":
        sys.stderr.flush()
        os.abort()
print("after", file=sys.stderr)
"""
KEPT = ["before", "F0000 00:00:1795732505.783078   12188 executor.cc:7] Check failed: no cuda drivers", "from Python"]


@pytest.mark.parametrize("how", ["ends", "aborts", "without grep"])
def test_only_these_lines_are_left_out(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], stderr=subprocess.PIPE, text=True, check=False)
    lines = done.stderr.splitlines()
    if how == "without grep":
        assert len(lines) == len(KEPT) + 3
        return
    assert lines == (KEPT if how == "aborts" else [*KEPT, "after"])
    assert done.returncode == (-signal.SIGABRT if how == "aborts" else 0)


def test_a_process_without_standard_error_needs_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(sys, "stderr", None)  # as Python sets it if it starts without one
    with without_driver_lines():
        pass
