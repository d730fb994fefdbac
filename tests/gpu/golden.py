"""The golden table of collectives: kind, bytes, participants and number, of each program on H100s.

``REPLICAX_WRITE_GOLDEN=1`` writes the table anew: look at what has changed before you keep it.
"""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

TABLE = pathlib.Path(__file__).with_name("collectives.json")


def check(name: str, collectives: Iterable[Any]) -> None:
    """The collectives of a program are those of the table."""
    found = sorted(f"{c.count} x {c.kind} of {c.bytes} among {c.participants}" for c in collectives)
    if os.environ.get("REPLICAX_WRITE_GOLDEN"):
        _write(name, found)
    expected = json.loads(TABLE.read_text()).get(name)
    assert found == expected, f"{name}: the golden table has {expected}"


def _write(name: str, found: list[str]) -> None:
    with TABLE.open("a+") as file:  # processes that share the tests take turns
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        table = json.loads(file.read() or "{}")
        file.truncate(0)
        file.write(json.dumps({**table, name: found}, indent=1, sort_keys=True) + "\n")
