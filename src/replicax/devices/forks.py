"""Forks: a child of a process with JAX's threads has none of them, and would wait for them for ever."""

from __future__ import annotations

import os

from replicax import _jax
from replicax.errors import ContextError

is_stranded = False
"""Whether this process is such a child."""


def check_not_stranded(what: str) -> None:
    """Raise a ContextError in a forked child that can't run programs; ``what`` is the call that would run one."""
    if is_stranded:
        raise ContextError(
            f"{what} was called in a process that was forked after JAX had made its devices. JAX's threads are in the "
            "parent only, so the call would never return. Start the process with "
            "multiprocessing.get_context('spawn'), or fork before the first array and the first strategy are made."
        )


def _note() -> None:
    global is_stranded
    is_stranded = is_stranded or _jax.backends_are_initialized()


os.register_at_fork(after_in_child=_note)
