"""Signals are kept waiting while JAX runs Python of its own in a launch; see :mod:`replicax.execution.launch`.

A signal's handler runs between two operations of Python in the main thread, and may raise, as the one for Ctrl-C does.
Between the moment when a program has been given the arrays of its variables and the one when the new arrays are stored,
that would lose both.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what signal wraps in enums, which takes 20 times as long
import threading
from collections.abc import Callable
from typing import Any

_SIGNALS = tuple(sorted(int(number) for number in _signal.valid_signals()))


def hold_signals() -> Callable[[], None]:
    """Let signals that have a handler in Python wait.

    The function that is returned puts the handlers back, and then calls them for the signals that have come.
    Only the main thread can; in others, where no handler ever runs, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    came: list[int] = []
    handlers: dict[int, Any] = {}

    def hold(number: int, frame: Any) -> None:
        if number not in came:
            came.append(number)

    def release() -> None:
        raised: BaseException | None = None
        while True:
            try:  # Handlers that are back already may raise anywhere in here, and the others must be put back, too.
                for number in list(handlers):
                    _signal.signal(number, handlers[number])
                    del handlers[number]
                while came:
                    _signal.raise_signal(came.pop())
                break
            except BaseException as error:
                raised = raised or error
        if raised is not None:
            raise raised

    try:
        for number, handler in zip(_SIGNALS, map(_signal.getsignal, _SIGNALS), strict=True):
            if callable(handler):  # and not the system's own, which ends the process, or none
                handlers[number] = handler
                _signal.signal(number, hold)
    except BaseException:
        release()
        raise
    return release
