"""Plans the cases of a search in separate processes: several at once, each with a deadline.

A case is a command line of ``replicax plan``, which writes its result to a file. A separate process can emulate the
number of devices that the case needs, can be killed while the compiler works, and does not end the search if the
compiler crashes. All end with the search: it kills them and their children; and each reads its standard input, a pipe
that only the search holds, and ends when that closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from replicax.cli.search.choices import SearchCase
from replicax.cli.search.ranking import CaseOutcome

_COMMAND = [sys.executable, "-c", "import sys; from replicax.cli import main; sys.exit(main())", "plan"]
_TURN = 0.05
_FOUND = "found.json"


class _CaseProcess:
    """The process of one case."""

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
                process_group=0,  # Ctrl-C reaches only the search, which ends all
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
        """The result, after the end of the process."""
        seconds = time.monotonic() - self.began
        report = self.folder / _FOUND
        if report.is_file():
            with contextlib.suppress(json.JSONDecodeError):  # it was killed while writing
                return CaseOutcome.of(self.case, json.loads(report.read_text()), seconds)
        code = self.process.returncode
        lines = (self.folder / "errors").read_text(errors="replace").strip().splitlines()
        if code < 0:
            name = signal.Signals(-code).name
            hint = ": perhaps the machine had too little memory; try fewer --jobs" if name == "SIGKILL" else ""
            return CaseOutcome.failed(self.case, f"its process was ended by {name}{hint}", seconds)
        reason = lines[-1].removeprefix("replicax plan: ").removeprefix("error: ") if lines else f"exit status {code}"
        return CaseOutcome.failed(self.case, reason, seconds)


def outcomes(
    cases: Sequence[SearchCase],
    arguments: Callable[[SearchCase], Sequence[str]],
    jobs: int,
    deadline: float,
    folder: Path,
) -> Generator[CaseOutcome]:
    """Plan the cases, ``jobs`` at once, and yield the result of each as soon as it is known.

    ``arguments`` returns those of ``replicax plan`` for a case, which has ``deadline`` seconds; its output is put into
    ``folder``. All processes end when the iteration does, by an interrupt or by the caller.
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
                reason = f"not planned within {deadline:g} s (--deadline)"
                yield CaseOutcome.failed(process.case, reason, deadline) if is_late else process.outcome()
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.end()


def end_with_search() -> None:
    """End this process, which plans a case, with the search: when its standard input closes."""

    def wait() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(0, 4096):
                pass
        os._exit(1)

    threading.Thread(target=wait, name="replicax-search", daemon=True).start()
