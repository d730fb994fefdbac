"""What the processes of a run note down as they go, each line at once, so that a killed one has noted it, too."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

NAME = "records.jsonl"


class Records:
    """A file of lines that several processes add to.

    Args:
      folder: where it is.
      attempt: of this process.
      worker: this one.

    Attributes:
      worker: this one.
    """

    def __init__(self, folder: Path, attempt: int, worker: int) -> None:
        self._file = os.open(folder / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._used = os.open(folder / f"used-{worker}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.worker = worker
        self._from = {"attempt": attempt, "worker": worker}

    def note(self, what: str, **more: Any) -> None:
        """Add a line."""
        line = json.dumps({"what": what, **self._from, **more, "time": time.time()})
        os.write(self._file, f"{line}\n".encode())

    def note_used(self, step: int, replica: int, examples: list[int]) -> None:
        """The examples that a step has used on a replica."""
        line = json.dumps([self._from["attempt"], step, replica, examples])
        os.write(self._used, f"{line}\n".encode())


def read_records(folder: Path, what: str = "") -> list[dict[str, Any]]:
    """The lines of one kind, or all."""
    path = folder / NAME
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry for line in lines if (entry := json.loads(line))["what"] == what or not what]


def read_used(folder: Path) -> list[tuple[int, int, int, list[int]]]:
    """Attempt, step, replica and examples, as they were used."""
    lines = [line for path in sorted(folder.glob("used-*.jsonl")) for line in path.read_text().splitlines()]
    return [tuple(json.loads(line)) for line in lines]  # type: ignore[misc]
