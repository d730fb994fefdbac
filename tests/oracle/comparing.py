"""What two outcomes have in common, and what that says about a program."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

from tests.oracle.program import Program
from tests.oracle.running import Outcome

TOLERANCE = 1e-5


class Verdict(enum.Enum):
    """What came of comparing."""

    AGREE = "agree"
    DIFFER_ON_PURPOSE = "differ on purpose"
    NOT_YET = "not yet"
    """They differ, and are not meant to."""
    UNEXPLAINED = "unexplained"
    """They differ, and nothing says why."""
    STALE = "stale"
    """They agree, and a reason says why they should not: that counts as unexplained, too."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a program did everywhere, and what to make of it.

    Attributes:
      program: the program.
      tensorflow: its outcome there.
      replicax: its outcome when compiled.
      exact: its outcome in the per-replica executor.
    """

    program: Program
    tensorflow: Outcome
    replicax: Outcome
    exact: Outcome

    @property
    def libraries(self) -> Verdict:
        """TensorFlow against Replicax."""
        agree = same(self.tensorflow, self.replicax)
        if self.program.not_yet is not None:
            return Verdict.STALE if agree else Verdict.NOT_YET
        return _verdict(agree, self.program.differs)

    @property
    def executors(self) -> Verdict:
        """Replicax's two executors against each other."""
        return _verdict(same(self.replicax, self.exact), self.program.executors_differ)

    @property
    def overall(self) -> Verdict:
        """What it counts as: a difference between the executors that nothing explains outweighs everything."""
        if {self.libraries, self.executors} & {Verdict.UNEXPLAINED, Verdict.STALE}:
            return Verdict.UNEXPLAINED
        return self.libraries


def _verdict(agree: bool, reason: str | None) -> Verdict:
    if agree:
        return Verdict.AGREE if reason is None else Verdict.STALE
    return Verdict.UNEXPLAINED if reason is None else Verdict.DIFFER_ON_PURPOSE


def same(a: Outcome, b: Outcome) -> bool:
    """Whether two outcomes agree: the same value, or the same kind of error, whatever its message."""
    return _equal({k: v for k, v in a.items() if k != "message"}, {k: v for k, v in b.items() if k != "message"})


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(a == b)
