"""Calling a program whose collectives have a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax

from replicax import _jax
from replicax.communication import watch
from replicax.errors import DeadlockError

_left_behind: list[threading.Thread] = []


def call_watched(call: Callable[..., Any], replicas: int, timeout: float, *args: Any) -> Any:
    """``call(*args)``, when it is done.

    Raises:
      DeadlockError: a replica has waited in a collective for longer than its options allow; names those that are
        missing. The program is left behind, as nothing can stop it.
    """
    _wait_for_those_left_behind(timeout)
    adopt = _jax.settings_of_this_thread()
    outcome: list[Any] = []

    def work() -> None:
        adopt()
        try:
            outcome.append((jax.block_until_ready(call(*args)), None))
        except BaseException as error:
            outcome.append((None, error))

    watch.start(replicas)
    thread = threading.Thread(target=work, name="a watched step", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(timeout=0.02)
        late = watch.overdue()
        if late is not None and thread.is_alive():
            _left_behind.append(thread)
            raise DeadlockError(late)
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def _wait_for_those_left_behind(timeout: float) -> None:
    """Their replicas would be taken for those of the next program, and they keep the devices anyway."""
    for thread in list(_left_behind):
        thread.join(timeout)
        if thread.is_alive():
            raise DeadlockError(
                f"a step whose collective has timed out before is still running after another {timeout} s, and keeps "
                "its devices"
            )
        _left_behind.remove(thread)
