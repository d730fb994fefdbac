"""``HostErrors``: what the user's Python raises that a program calls on the host, in the run that is waited for."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import jax


class HostErrors:
    """The errors of one run at a time; see :mod:`replicax.execution.compiled.host_calls`.

    Attributes:
      are_noted: whether a run is waited for, after which its first error is raised.
      first: the first error of that run, if there is one.
      since: when it came, by ``time.monotonic``.
    """

    def __init__(self) -> None:
        self.are_noted, self.since = False, 0.0
        self.first: BaseException | None = None
        self._unfinished: Any = None

    def begin(self) -> None:
        """A run begins. One that is not waited for any more must be over, or its errors would be those of this run."""
        with contextlib.suppress(Exception):
            jax.block_until_ready(self._unfinished)
        self._unfinished = self.first = None
        self.are_noted = True

    def note(self, error: BaseException) -> None:
        """A call has raised ``error``."""
        if self.first is None:
            self.since, self.first = time.monotonic(), error

    def end(self, unfinished: Any = None) -> BaseException | None:
        """The first error of a run that is over, or is not waited for any more: then it will return ``unfinished``."""
        error, self.first = self.first, None
        self.are_noted, self._unfinished = False, unfinished
        return error
