"""What a thread is in the middle of, and how to get it out of there."""

from __future__ import annotations

from collections.abc import Callable

from replicax import _jax, context
from replicax.variables import store


def state_of_this_thread() -> Callable[[], None]:
    """A function that puts back the contexts, stores and traces that this thread is in, as they are now.

    For after an exception. Blocks that are left clear up behind themselves, but an interrupt may come just where one is
    entered or left. What is left behind then would be taken for a step that is still running.
    """
    parts = (context.state_of_this_thread(), store.state_of_this_thread(), _jax.trace_of_this_thread())

    def put_back() -> None:
        for part in parts:
            part()

    return put_back
