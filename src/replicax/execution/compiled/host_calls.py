"""Calls of the host don't fail inside a program: their errors are noted, and raised when the program is over.

XLA can't abort a program. A device whose call has failed would end, and the others would wait for it in their next
collective: on CPUs until XLA ends the process after a minute, on GPUs for ever. So after an error nothing is called any
more, and the results of calls are zeros. Calls inside a user's ``shard_map``, and in loops and branches that take
mutable arrays, fail where they are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from replicax import _jax, communication
from replicax._jax.primitive_families import HOST_CALLS
from replicax.execution.compiled.program_rewriting import Rewriting, Rule

PATIENCE = 5.0
"""How many seconds a ``while`` loop, which zeros may never end, may run after an error; then a call in it fails.

If XLA moves the call out of the loop, nothing ends it.
"""


class HostErrors:
    """The errors of one run at a time."""

    def __init__(self) -> None:
        self.are_noted = False  # whether a run is waited for, after which its first error is raised
        self.first: BaseException | None = None  # the first error of that run, if there is one
        self.since = 0.0  # the time of that error, by ``time.monotonic``
        self._unfinished: Any = None

    def begin(self) -> None:
        """Begin a run. First wait for one that was left unfinished: its errors would count as this run's."""
        with contextlib.suppress(Exception):
            jax.block_until_ready(self._unfinished)
        self._unfinished = self.first = None
        self.are_noted = True

    def note(self, error: BaseException) -> None:
        """Note the error of a call."""
        if self.first is None:
            self.since, self.first = time.monotonic(), error

    def end(self, unfinished: Any = None) -> BaseException | None:
        """The first error of the run, which is over, or is left to compute the arrays ``unfinished``."""
        error, self.first = self.first, None
        self.are_noted, self._unfinished = False, unfinished
        return error


class HostCalls(Rule):
    """The rule for calls of the host; it comes first.

    After an error the calls return zeros. ``may_be_endless`` says that the program calls in a ``while`` loop, which
    these zeros may never end.
    """

    def __init__(self, errors: HostErrors, may_be_endless: bool) -> None:
        self._errors, self._may_be_endless = errors, may_be_endless

    def is_ours(self, equation: _jax.Equation) -> bool:
        is_call = equation.primitive.name in HOST_CALLS and _jax.callback_of(equation) is not None
        return is_call and not of_watch(equation)

    def replaced(self, equation: Any, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        return rewriting.after(self, _jax.with_callback(equation, self._guarded(equation)), operands)

    def _guarded(self, equation: Any) -> Callable[..., Any]:
        zeros = [np.zeros(v.aval.shape, v.aval.dtype) for v in equation.outvars]
        callback, errors, may_be_endless = _jax.callback_of(equation), self._errors, self._may_be_endless

        def call(*args: Any) -> Any:
            if not errors.are_noted:
                return callback(*args)
            if errors.first is None:
                try:
                    return callback(*args)
                except BaseException as error:
                    errors.note(error)
            first = errors.first
            if first is not None and may_be_endless and time.monotonic() - errors.since > PATIENCE:
                raise first
            return zeros

        return call


def of_watch(equation: _jax.Equation) -> bool:
    """Whether a call of the host is one of :data:`replicax.communication.watch`, in :func:`watched` collectives."""
    return getattr(_jax.host_function(equation), "__module__", None) == communication.__name__
