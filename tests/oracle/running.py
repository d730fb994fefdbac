"""Running the programs of one side in processes that are ended when they take too long."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from subprocess import PIPE
from typing import IO, Any

from tests.oracle.program import Program

Outcome = dict[str, Any]

START_LIMIT = 180.0
"""Seconds until a library must be loaded."""
PROGRAM_LIMIT = 60.0
"""Seconds that one program may take."""
RESTART = "Restart your program to reset"
"""What TensorFlow says when a collective failed in such a way that every later one would fail too."""


class DidNotStartError(RuntimeError):
    """The process of one side ended, or said nothing, before it could run programs."""


def _outcomes(side: str, programs: Sequence[Program]) -> Iterator[tuple[Program, Outcome]]:
    """What each program did, in one process. Ends early after a program in whose process no other can follow."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "tests.oracle.side", side]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=log, text=True, env=environment) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        lines = _lines_of(process.stdout)
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write("\n".join(program.name for program in programs))
                process.stdin.close()
            if _next(lines, START_LIMIT) is None:
                raise DidNotStartError(f"{side} ended, or said nothing for {START_LIMIT:.0f} s:\n{_end_of(log)}")
            for program in programs:
                started = time.monotonic()
                line = _next(lines, PROGRAM_LIMIT)
                if line is not None:
                    outcome = json.loads(line)["outcome"]
                    yield program, outcome
                    if RESTART in outcome.get("message", ""):
                        return
                elif time.monotonic() - started < PROGRAM_LIMIT:
                    yield program, {"error": "end of the process", "message": _end_of(log)}
                    return
                else:
                    yield program, {"error": "no end", "message": f"did not return within {PROGRAM_LIMIT:.0f} s"}
                    return
        finally:
            process.kill()


def _lines_of(stream: IO[str]) -> queue.Queue[str | None]:
    """A queue that gets each line, and ``None`` at the end: unlike the stream, it can be waited on with a limit."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _next(lines: queue.Queue[str | None], limit: float) -> str | None:
    """The next line; ``None`` if the process has ended, or did not say anything for ``limit`` seconds."""
    try:
        return lines.get(timeout=limit)
    except queue.Empty:
        return None


def _end_of(log: IO[str]) -> str:
    log.seek(0)
    return log.read()[-2000:]


def run_side(side: str, programs: Sequence[Program], done: Callable[[], object]) -> dict[str, Outcome]:
    """What every program did on one side, by its name.

    Args:
      side: one of ``tests.oracle.side.SIDES``.
      programs: what to run. Those that ask for it have a process of their own, and so has each number of replicas:
        TensorFlow's collectives of two strategies in one process disturb each other.
      done: called after each.
    """
    outcomes: dict[str, Outcome] = {}
    pending = [[program] for program in programs if program.own_process]
    pending.append([p for p in programs if p.servers and not p.own_process])
    for replicas in sorted({program.replicas for program in programs}):
        pending.append([p for p in programs if p.replicas == replicas and not (p.own_process or p.servers)])
    pending = [batch for batch in pending if batch]
    while pending:
        batch = pending.pop()
        for program, outcome in _outcomes(side, batch):
            outcomes[program.name] = outcome
            done()
        if rest := [program for program in batch if program.name not in outcomes]:
            pending.append(rest)
    return outcomes
