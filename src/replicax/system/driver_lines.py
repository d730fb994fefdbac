"""Hide lines that XLA's code for GPUs writes where there is no driver, as on every laptop that plans for GPUs.

It writes these lines whatever its log level is, while JAX loads it and while it describes GPUs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator

_LINES = r"cudart_stub\.cc:[0-9]+\] Could not find cuda drivers|^WARNING: All log messages before absl::InitializeLog"
_SECONDS = 1.0


@contextlib.contextmanager
def without_driver_lines() -> Iterator[None]:
    """Leave these lines out of what this process writes to its standard error; all others are written at once.

    Another process takes them out, so that nothing is lost of what XLA writes before it ends this process.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no grep, or no standard error
            if importlib.util.find_spec("jax_plugins") is not None:
                stack.enter_context(_filtered_stderr())
        yield


@contextlib.contextmanager
def _filtered_stderr() -> Iterator[None]:
    sys.stderr.flush()
    before = os.dup(2)
    command = ["grep", "--line-buffered", "-v", "-E", _LINES]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=before, env={**os.environ, "LC_ALL": "C"})
    except OSError:
        os.close(before)
        raise
    assert process.stdin is not None
    os.dup2(process.stdin.fileno(), 2)
    process.stdin.close()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that was started meanwhile writes there, too
            process.wait(_SECONDS)
