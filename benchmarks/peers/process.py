"""A training of one peer in a process of its own, seen from the process that measures."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.peers.problems import Problem
from benchmarks.peers.roster import DEFAULT, Peer, environment

LIMIT = 300.0
"""Seconds that one answer may take."""


class PeerFailedError(RuntimeError):
    """A peer's process ended, or said nothing for too long."""


class Side:
    """One training. Use it in ``with``: its process, and what that has started, end with it.

    Attributes:
      ready: what the process said of itself: ``ready_s``, seconds for the imports and the model, and ``parameters``.
    """

    def __init__(self, peer: Peer, problem: Problem, replicas: int, setting: str = DEFAULT) -> None:
        self._what = f"{peer.name}, {problem.name}, {replicas} replicas, {setting} threads"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.side", peer.name, problem.name, str(replicas)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment(peer, setting),
            cwd=Path(__file__).parents[2],
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.ready = self._answer()
        except PeerFailedError:
            self.close()
            raise

    def ask(self, command: str) -> dict[str, Any]:
        """Send one line, and wait for the answer.

        Raises:
          PeerFailedError: the process ended or said nothing within ``LIMIT`` seconds; has the end of its log.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what it said last tells why
        return self._answer()

    def close(self) -> None:
        """Let it end by itself, or end it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(60)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=LIMIT)
        except queue.Empty:
            raise PeerFailedError(f"{self._what}: no answer for {LIMIT:.0f} s\n{self._end_of_log()}") from None
        if line is None:
            raise PeerFailedError(f"{self._what}: its process ended\n{self._end_of_log()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end_of_log(self) -> str:
        self._log.seek(0)
        return self._log.read()[-3000:]
