"""Calls of the host don't fail inside a program: what they raise is noted, and raised when the program is over.

XLA can't break a program off. A device whose call has failed would end, and the others would wait for it in their next
collective: on CPUs until XLA ends the process after a minute, on GPUs for ever.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from replicax import _jax, communication
from replicax._jax.primitive_families import HOST_CALLS
from replicax.execution.compiled.program_rewriting import Rewriting, Rule

MANY = 1000
"""After so many calls that came to nothing a program fails where it is: it may be in a loop that zeros don't end.

Where XLA makes the call once, before such a loop, nothing ends it.
"""


class HostCalls(Rule):
    """The rule; it comes first.

    Args:
      errors: where the errors of a run of the program are put. There is one at most, unless several devices call at the
        same time: after an error there are no more calls, and their results are zeros.
    """

    def __init__(self, errors: list[BaseException]) -> None:
        self._errors = errors

    def is_ours(self, equation: _jax.Equation) -> bool:
        return (
            equation.primitive.name in HOST_CALLS and _jax.callback_of(equation) is not None and not of_watch(equation)
        )

    def replaced(self, equation: Any, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        results = [np.zeros(v.aval.shape, v.aval.dtype) for v in equation.outvars]
        guarded = _jax.with_callback(equation, _GuardedCall(_jax.callback_of(equation), results, self._errors))
        later = rewriting.rule_after(self, guarded)
        return _jax.bind(guarded, operands) if later is None else later.replaced(guarded, operands, rewriting)


class _GuardedCall:
    def __init__(self, callback: Any, results: list[Any], errors: list[BaseException]) -> None:
        self._callback, self._results, self._errors = callback, results, errors
        self._skipped = 0

    def __call__(self, *args: Any) -> Any:
        if not self._errors:
            self._skipped = 0
            try:
                return self._callback(*args)
            except BaseException as error:
                self._errors.append(error)
        self._skipped += 1
        if self._skipped > MANY:
            raise self._errors[0]
        return self._results


def of_watch(equation: _jax.Equation) -> bool:
    """Whether a call of the host is one of the watch's, which counts the replicas that call."""
    return getattr(_jax.host_function(equation), "__module__", None) == communication.__name__
