"""What is left to read: parts of a dataset, which any number of workers can share anew.

A *stream* is what one worker reads, or all of them alike. Its state says which parts of the dataset are its own, and
how far it has come; it is plain data, as goes into JSON. When a run goes on with other workers, what is left of all
streams is cut up and dealt out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Part = dict[str, Any]
"""Of examples with numbers: ``files`` (or ``None`` for the whole dataset), ``start`` and ``stop``. Of others:
``files``, ``skip`` (how many records at the start of a file are done) and ``state`` (of the iterator; ``None`` at the
start)."""

PARTS = "replicax_parts"


def remaining(parts: Sequence[Part], done: int) -> list[Part]:
    """Parts of numbered examples, without the first ``done`` ones.

    >>> from replicax.data.reading.elastic import remaining
    >>> remaining([{"files": None, "start": 0, "stop": 5}, {"files": None, "start": 7, "stop": 9}], 6)
    [{'files': None, 'start': 8, 'stop': 9}]
    """
    left = []
    for part in parts:
        size = part["stop"] - part["start"]
        if done < size:
            left.append({**part, "start": part["start"] + done})
        done = max(0, done - size)
    return left


def dealt_evenly(parts: Sequence[Part], count: int) -> list[list[Part]]:
    """Parts of numbered examples for ``count`` streams, each with as many examples as the others, or one more.

    >>> from replicax.data.reading.elastic import dealt_evenly
    >>> dealt_evenly([{"files": None, "start": 0, "stop": 5}], 2)
    [[{'files': None, 'start': 0, 'stop': 3}], [{'files': None, 'start': 3, 'stop': 5}]]
    """
    total = sum(part["stop"] - part["start"] for part in parts)
    sizes = [total // count + (i < total % count) for i in range(count)]
    streams = []
    rest = list(parts)
    for size in sizes:
        mine = []
        after = remaining(rest, size)
        kept = total - sum(p["stop"] - p["start"] for p in after)
        for part in rest:
            if kept <= 0:
                break
            take = min(kept, part["stop"] - part["start"])
            mine.append({**part, "stop": part["start"] + take})
            kept -= take
        total -= size
        rest = after
        streams.append(mine)
    return streams


def dealt_by_file(parts: Sequence[Part], count: int) -> list[list[Part]]:
    """Parts at the start of their files, or after the first records of them, for ``count`` streams."""
    files = [(file, part["skip"].get(file, 0)) for part in parts for file in part["files"]]
    hands = [files[i::count] for i in range(count)]
    return [
        [{"files": [f for f, _ in h], "skip": {f: n for f, n in h if n}, "state": None}] if h else [] for h in hands
    ]


def dealt_whole(parts: Sequence[Part], count: int) -> list[list[Part]]:
    """Parts that nothing is known of, for ``count`` streams."""
    return [list(parts[i::count]) for i in range(count)]


def find(state: Any, key: str) -> Any:
    """The value of ``key`` in the nested state of an iterator; ``None`` if it is not in there exactly once."""
    if isinstance(state, dict):
        if key in state:
            return state[key]
        state = list(state.values())
    found = [v for v in (find(s, key) for s in state) if v is not None] if isinstance(state, list) else []
    return found[0] if len(found) == 1 else None


def check_count(number: Any, what: str, most: int | None = None, least: int = 0) -> None:
    """Raise unless ``number``, out of a state, is one that a pass over the dataset can have come to.

    Raises:
      ValueError: it is no integer, or outside ``least`` and ``most``.

    >>> from replicax.data.reading.elastic import check_count
    >>> check_count(-5, "the position of the state", 8)
    Traceback (most recent call last):
    ValueError: the position of the state must be an integer from 0 to 8, as far as this dataset goes, got -5
    """
    is_integer = isinstance(number, int) and not isinstance(number, bool)
    if not is_integer or number < least or (most is not None and number > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}, as far as this dataset goes"
        raise ValueError(f"{what} must be an integer {limits}, got {number!r}")
