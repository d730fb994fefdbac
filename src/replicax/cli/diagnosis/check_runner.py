"""Runs all checks at the same time, each with a deadline."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from replicax.cli.diagnosis.findings import Finding, wrong

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")

_GRACE = 0.5
"""Seconds beyond its deadline in which a check may still report the reason itself."""
_AT_ONCE = 64
_DYING = 0.3
"""Seconds for a process to die; inside a driver it may not."""


class Check(NamedTuple):
    """A check of one thing."""

    topic: str  # the subject, for a finding if the check does not end
    run: Callable[[float], Sequence[Finding]]  # runs the check, given its number of seconds; it should end by then


def run_checks(checks: Sequence[Check], seconds: float) -> list[Finding]:
    """Run all checks; returns their findings in order, and a finding for each that fails or exceeds the ``seconds``."""

    def run(check: Check) -> Sequence[Finding]:
        try:
            return check.run(seconds)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            to_do = f"this is a mistake of replicax doctor's ({where.filename}:{where.lineno}): please report it"
            return [wrong(check.topic, f"can't be looked at: {type(error).__name__}: {error}", to_do)]

    findings = run_concurrently(run, checks, time.monotonic() + seconds + _GRACE)
    hint = "find out what hangs; if it is only slow: --timeout 60"
    late = [[wrong(check.topic, f"no answer within {seconds:.1f} s", hint)] for check in checks]
    return [finding for number in range(len(checks)) for finding in findings.get(number, late[number])]


def run_concurrently(
    fn: Callable[[_Argument], _Result], arguments: Sequence[_Argument], deadline: float
) -> dict[int, _Result]:
    """Call ``fn`` with each of the arguments; returns the results by number, without those that miss the deadline.

    ``fn`` must not raise. Neither this function nor the end of the process waits for the rest: some calls, such as
    those to a driver or a name server, can't be cancelled.
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
    results: dict[int, _Result] = {}
    while len(results) < len(arguments):
        try:
            number, result = done.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        results[number] = result
    return results


def run_process(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> tuple[str, str, int | None]:
    """Run a command, and kill it after ``seconds``; does not wait for it if it does not die.

    Returns its output, its errors, and its exit code (``None`` if it was killed); raises an OSError if it can't start.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_DYING)
        output.seek(0)
        errors.seek(0)
        return output.read().decode(errors="replace"), errors.read().decode(errors="replace"), code
