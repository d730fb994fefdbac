"""The examination: all checks at the same time, each with a deadline."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from replicax.cli.diagnosis.findings import Finding, wrong

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")

_GRACE = 0.5
"""Seconds that a check may take longer than it should, to say itself why."""
_AT_ONCE = 64


class Check(NamedTuple):
    """Something to look at.

    Attributes:
      topic: what it is about, for when it has no findings because it does not end.
      look: looks, given how many seconds it has; it ends by then if it can.
    """

    topic: str
    look: Callable[[float], Sequence[Finding]]


def examine(checks: Sequence[Check], seconds: float) -> list[Finding]:
    """What all checks have found, in their order; that one has not ended in time, or failed, is a finding.

    Args:
      checks: what to look at.
      seconds: how long they may take, all at the same time.
    """

    def look(check: Check) -> Sequence[Finding]:
        try:
            return check.look(seconds)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            to_do = f"this is a mistake of replicax doctor's ({where.filename}:{where.lineno}): please report it"
            return [wrong(check.topic, f"can't be looked at: {type(error).__name__}: {error}", to_do)]

    found = at_the_same_time(look, checks, time.monotonic() + seconds + _GRACE)
    hint = "find out what hangs; if it is only slow: --timeout 60"
    late = [[wrong(check.topic, f"no answer within {seconds:.1f} s", hint)] for check in checks]
    return [finding for number in range(len(checks)) for finding in found.get(number, late[number])]


def at_the_same_time(
    fn: Callable[[_Argument], _Result], arguments: Sequence[_Argument], deadline: float
) -> dict[int, _Result]:
    """What ``fn`` returns for each of the arguments, by their numbers; what is not there by the deadline is left out.

    Nobody waits for the rest, not even the end of the process: some calls, such as those to a driver or a name server,
    can't be called off.

    Args:
      fn: raises nothing.
      arguments: those of the calls.
      deadline: of ``time.monotonic()``.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, _Result]] = queue.SimpleQueue()
    for number in range(len(arguments)):
        waiting.put(number)

    def work() -> None:
        while time.monotonic() < deadline:
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            done.put((number, fn(arguments[number])))

    for _ in range(min(_AT_ONCE, len(arguments))):
        threading.Thread(target=work, name="replicax-doctor", daemon=True).start()
    found: dict[int, _Result] = {}
    while len(found) < len(arguments):
        try:
            number, result = done.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        found[number] = result
    return found
