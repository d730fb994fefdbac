"""Attempt times: a file in which each attempt at a run notes its time, so that the next one knows what was lost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from replicax.loop.wall_time import KINDS_OF_WORK, LOST
from replicax.system.folders import naming
from replicax.system.json_files import parsed, read_regular

NAME = "attempts.jsonl"
_MOST_BYTES = 1 << 30


@dataclasses.dataclass
class PastAttempt:
    """One process's part of a run, from step ``resumed_at`` on."""

    resumed_at: int
    notes: list[tuple[int, Mapping[str, float]]] = dataclasses.field(default_factory=list)
    """The steps that it had come to, each with the seconds that it had spent by then on each kind of work."""


class Attempts:
    """The attempts at a run, the last of which is this one, which goes on from step ``resumed_at``.

    A file in ``folder`` has them; without a folder nothing is written, and nothing is known of other attempts. Unless
    the run ``goes_on`` from another attempt, the file is begun anew.
    """

    def __init__(self, folder: pathlib.Path | None, resumed_at: int, goes_on: bool) -> None:
        self._path = None if folder is None else folder / NAME
        self.before: list[PastAttempt] = []
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if goes_on:
            self.before = read(self._path)
        else:
            self._path.unlink(missing_ok=True)
        self._append({"attempt": len(self.before) + 1, "resumed_at": resumed_at})
        self.resumed_at = resumed_at

    def note(self, step: int, seconds: Mapping[str, float]) -> None:
        """Record that this attempt has come to ``step``, and has spent ``seconds``."""
        if self._path is not None:
            self._append({"step": step, "seconds": {k: round(s, 4) for k, s in seconds.items() if s}})

    def total(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """The seconds of all attempts by kind, of which this one has spent ``seconds``; lost work is a kind, too."""
        if not self.before:
            return dict(seconds)
        return added_up([*self.before, PastAttempt(self.resumed_at, [(self.resumed_at, seconds)])])

    def _append(self, entry: dict[str, Any]) -> None:
        assert self._path is not None
        with naming(self._path), self._path.open("a") as file:
            file.write("\n" + json.dumps(entry))  # behind a line that its writer could not finish


def added_up(attempts: Sequence[PastAttempt]) -> dict[str, float]:
    """The seconds of attempts, in their order, by kind; what came after the step that later ones went on from is lost.

    >>> first = PastAttempt(
    ...     0, [(0, {"start": 1.0}), (10, {"start": 1.0, "steps": 5.0}), (14, {"start": 1.0, "steps": 7.0})]
    ... )
    >>> {kind: s for kind, s in added_up([first, PastAttempt(10)]).items() if s}
    {'start': 1.0, 'steps': 5.0, 'lost work': 2.0}
    """
    total = dict.fromkeys((*KINDS_OF_WORK, LOST), 0.0)
    for number, attempt in enumerate(attempts):
        kept_until = min((later.resumed_at for later in attempts[number + 1 :]), default=math.inf)
        kept: Mapping[str, float] = {}
        last: Mapping[str, float] = {}
        for step, seconds in attempt.notes:
            last = seconds
            if step <= kept_until:
                kept = seconds
        for kind in KINDS_OF_WORK:
            total[kind] += kept.get(kind, 0.0)
        total[LOST] += sum(last.values()) - sum(kept.values())
    return total


def read(path: pathlib.Path) -> list[PastAttempt]:
    """The attempts in a file. A line that its writer could not finish, or that is another's, is left out."""
    attempts: list[PastAttempt] = []
    try:
        lines = read_regular(path, _MOST_BYTES).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise OSError(f"{path}, which has the times of earlier attempts, can't be read: {error}; remove it") from error
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, OverflowError):
            entry = parsed(line)
            if "resumed_at" in entry:
                attempts.append(PastAttempt(int(entry["resumed_at"])))
            elif attempts:
                seconds = {str(kind): float(spent) for kind, spent in entry["seconds"].items()}
                attempts[-1].notes.append((int(entry["step"]), seconds))
    return attempts
