"""Calling a program whose collectives have a deadline."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import jax

from replicax import _jax
from replicax.communication import Late, watch
from replicax.errors import DeadlockError, WorkerError
from replicax.workers.codec import declared, dumps, loads
from replicax.workers.exchange import Cancelled
from replicax.workers.replicas import Replicas

declared(Late)

_left_behind: list[threading.Thread] = []


def call_watched(call: Callable[..., Any], replicas: Replicas, timeout: float) -> Any:
    """The result of a program of ``replicas``, when it is done; its collectives have at most ``timeout`` seconds.

    If a collective takes longer, a DeadlockError names the replicas that are missing, or the workers that have not
    noticed anything, as they don't run the step. The program is left behind, as nothing can stop it.
    """
    _wait_for_those_left_behind(timeout)
    adopt = _jax.settings_of_this_thread()
    outcome: list[Any] = []

    def work() -> None:
        adopt()
        try:
            outcome.append((jax.block_until_ready(call()), None))
        except BaseException as error:
            outcome.append((None, error))

    watch.start(replicas.local_replicas)
    number = replicas.lockstep.next_watched()
    thread = threading.Thread(target=work, name="a watched step", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            try:
                thread.join(timeout=0.02)
                replicas.lockstep.check()
            except (WorkerError, DeadlockError):
                thread.join(timeout=1.0)  # it may have been broken off by the same
                if thread.is_alive():
                    raise
            late = watch.overdue()
            if late is not None and thread.is_alive():
                with contextlib.suppress(Cancelled):  # the missing workers have come while we asked
                    raise DeadlockError(_of_all_workers(late, replicas, number, lambda: not thread.is_alive()))
    except BaseException:  # also an interrupt
        _left_behind.append(thread)
        replicas.lockstep.launches.leave_behind(thread)
        raise
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def _of_all_workers(late: Late, replicas: Replicas, number: int, is_over: Callable[[], bool]) -> str:
    """Return the message that names the waiting workers and those that they wait for."""
    if not replicas.lockstep.several:
        return str(late)
    # The last worker to come has waited for less time than we have; it will ask, too, when its own time is over.
    patience = late.timeout + 1.0
    try:
        everyone = replicas.lockstep.workers.exchange(f"late/{number}", dumps(late), patience, is_over)
    except TimeoutError as error:
        return f"{late}; {error}"
    return str(late.joined([loads(theirs) for theirs in everyone]))


def _wait_for_those_left_behind(timeout: float) -> None:
    """Wait for steps that were left behind: their replicas would be taken for those of the next program."""
    for thread in list(_left_behind):
        thread.join(timeout)
        if thread.is_alive():
            raise DeadlockError(
                f"a step whose collective has timed out before is still running after another {timeout} s, and keeps "
                "its devices"
            )
        _left_behind.remove(thread)
