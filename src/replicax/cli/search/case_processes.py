"""Planning the cases of a search, each in a process of its own: several at once, each with a deadline.

A case is a command line of ``replicax plan``, which writes what it finds to a file. A process of its own has the number
of emulated devices that it needs, can be ended while the compiler works, and takes nothing with it when the compiler
fails. All end with the search: what it ends itself it kills, with all that they have started; and each reads its
standard input, a pipe that nobody else has, and ends when that closes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from replicax.cli.search.choices import SearchCase

_COMMAND = [sys.executable, "-c", "import sys; from replicax.cli import main; sys.exit(main())", "plan"]
_TURN = 0.05
_FOUND = "found.json"


@dataclasses.dataclass(frozen=True)
class CaseOutcome:
    """What has become of a case.

    Attributes:
      case: which.
      found: what its process has written: a plan's data and ``"examples"``; ``None`` if it has not come to that.
      reason: why not, in a line.
      seconds: how long it took.
    """

    case: SearchCase
    found: dict[str, Any] | None
    reason: str = ""
    seconds: float = 0.0


class _CaseProcess:
    """The process of one case.

    Args:
      case: which.
      arguments: of ``replicax plan``.
      folder: for what it writes; it must not be there yet.
    """

    def __init__(self, case: SearchCase, arguments: Sequence[str], folder: Path) -> None:
        self.case = case
        self.folder = folder
        folder.mkdir()
        self.began = time.monotonic()
        with (folder / "output").open("wb") as output, (folder / "errors").open("wb") as errors:
            self.process = subprocess.Popen(
                [*_COMMAND, *arguments, "--case", str(folder / _FOUND)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                process_group=0,  # Ctrl-C is for the search, which ends all; and it stays as nice as the search
                env={**os.environ, "TMPDIR": str(folder)},
            )

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def outcome(self) -> CaseOutcome:
        """After its end."""
        seconds = time.monotonic() - self.began
        found = self.folder / _FOUND
        if found.is_file():
            with contextlib.suppress(json.JSONDecodeError):  # it has been ended while it wrote
                return CaseOutcome(self.case, json.loads(found.read_text()), seconds=seconds)
        code = self.process.returncode
        lines = (self.folder / "errors").read_text(errors="replace").strip().splitlines()
        if code < 0:
            name = signal.Signals(-code).name
            hint = ": perhaps the machine had too little memory; try fewer --jobs" if name == "SIGKILL" else ""
            return CaseOutcome(self.case, None, f"its process was ended by {name}{hint}", seconds)
        reason = lines[-1].removeprefix("replicax plan: ").removeprefix("error: ") if lines else f"exit status {code}"
        return CaseOutcome(self.case, None, reason, seconds)


def outcomes(
    cases: Sequence[SearchCase],
    arguments: Callable[[SearchCase], Sequence[str]],
    jobs: int,
    deadline: float,
    folder: Path,
) -> Generator[CaseOutcome]:
    """Plan the cases, so many at once, and give what has become of each as soon as it is known.

    Whatever ends the iteration, an interrupt or the caller, ends all processes.

    Args:
      cases: in the order in which they begin.
      arguments: of ``replicax plan``, for a case.
      jobs: how many at once.
      deadline: of each, in seconds.
      folder: an empty one, for what they write.
    """
    waiting = list(enumerate(cases))
    running: list[_CaseProcess] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, case = waiting.pop(0)
                running.append(_CaseProcess(case, arguments(case), folder / str(number)))
            time.sleep(_TURN)
            for process in list(running):
                is_late = time.monotonic() - process.began > deadline
                if process.process.poll() is None and not is_late:
                    continue
                is_late &= process.process.poll() is None
                running.remove(process)
                process.end()
                late = CaseOutcome(process.case, None, f"not planned within {deadline:g} s (--deadline)", deadline)
                yield late if is_late else process.outcome()
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.end()


def end_with_search() -> None:
    """End this process, which plans a case, when the search ends: when its standard input closes."""

    def wait() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(0, 4096):
                pass
        os._exit(1)

    threading.Thread(target=wait, name="replicax-search", daemon=True).start()
