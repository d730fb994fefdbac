"""The remaining parts of a dataset in the middle of a pass, which any number of workers can divide again.

A *stream* is read by one worker, or by all alike. Its state has the parts of the dataset that belong to it, and its
place in them; it is plain data that JSON can hold. When a run continues with other workers, the rest of all
streams is divided again.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

from replicax.argument_checks import as_integer

Part = dict[str, Any]
"""A part of numbered examples: ``files`` (their :func:`names_of`; ``None`` for the whole dataset), ``start`` and
``stop``. Of other records: ``files``, ``skip`` (how many records at the start of a file are done) and ``state`` (of the
iterator; ``None`` at the start)."""

PARTS = "replicax_parts"


def names_of(files: Sequence[str]) -> list[str]:
    """Names of files for states: the shortest ends of their paths that differ, as directories may differ between hosts.

    >>> names_of(["/data/a/0.txt", "/data/b/1.txt"]), names_of(["/data/a/0.txt", "/data/b/0.txt"])
    (['0.txt', '1.txt'], ['a/0.txt', 'b/0.txt'])
    """
    paths = [file.replace(os.sep, "/").split("/") for file in files]
    for count in range(1, max(map(len, paths), default=0)):
        names = ["/".join(path[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return list(files)


def between(parts: Sequence[Part], start: int, stop: int) -> list[Part]:
    """The numbered examples in ``parts`` from place ``start`` to before ``stop``.

    >>> between([{"files": None, "start": 0, "stop": 5}, {"files": None, "start": 7, "stop": 9}], 3, 6)
    [{'files': None, 'start': 3, 'stop': 5}, {'files': None, 'start': 7, 'stop': 8}]
    """
    found, place = [], 0
    for part in parts:
        first, size = part["start"], part["stop"] - part["start"]
        low, high = max(start - place, 0), min(stop - place, size)
        if low < high:
            found.append({**part, "start": first + low, "stop": first + high})
        place += size
    return found


def size_of(parts: Sequence[Part]) -> int:
    """The number of numbered examples in ``parts``."""
    return sum(part["stop"] - part["start"] for part in parts)


def divided_evenly(parts: Sequence[Part], count: int) -> list[list[Part]]:
    """Divide numbered examples among ``count`` streams, each with as many as the others, or one more.

    >>> [(part["start"], part["stop"]) for [part] in divided_evenly([{"files": None, "start": 0, "stop": 7}], 3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    total = size_of(parts)
    bounds = [i * (total // count) + min(i, total % count) for i in range(count + 1)]
    return [between(parts, start, stop) for start, stop in itertools.pairwise(bounds)]


def divided_by_file(parts: Sequence[Part], count: int) -> list[list[Part]]:
    """Divide parts at the start of their files, or after the first records of them, among ``count`` streams."""
    files = [(file, part["skip"].get(file, 0)) for part in parts for file in part["files"]]
    divided = [files[i::count] for i in range(count)]
    return [
        [{"files": [f for f, _ in own], "skip": {f: n for f, n in own if n}, "state": None}] if own else []
        for own in divided
    ]


def find(state: Any, key: str) -> Any:
    """The value of ``key`` in the nested state of an iterator; ``None`` unless it is there exactly once."""
    if isinstance(state, dict):
        if key in state:
            return state[key]
        state = list(state.values())
    found = [v for v in (find(s, key) for s in state) if v is not None] if isinstance(state, list) else []
    return found[0] if len(found) == 1 else None


def check_count(number: Any, what: str, most: int | None = None, least: int = 0) -> None:
    """Raise unless a pass over the dataset can have reached ``number``, from a state.

    Raises:
      ValueError: it is not an integer, or outside ``least`` and ``most``.

    >>> check_count(-5, "the position of the state", 8)
    Traceback (most recent call last):
    ValueError: the position of the state must be an integer from 0 to 8, as far as this dataset goes, got -5
    """
    integer = as_integer(number)
    if integer is None or integer < least or (most is not None and integer > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}, as far as this dataset goes"
        raise ValueError(f"{what} must be an integer {limits}, got {number!r}")
