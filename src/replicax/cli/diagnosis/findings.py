"""Findings: the result of a check, its severity, and the remedy."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any


class State(enum.Enum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """It works, but slowly, or not everywhere."""
    WRONG = "wrong"
    """Something will fail."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report."""

    topic: str  # the subject, in a word or two
    state: State
    what: str  # the result of the check
    to_do: str = ""  # what to change, if something is wrong
    data: dict[str, Any] = dataclasses.field(default_factory=dict)  # the same as plain data

    def as_dict(self) -> dict[str, Any]:
        """The finding as plain data."""
        fields: dict[str, Any] = {"topic": self.topic, "state": self.state.value, "what": self.what}
        return {**fields, **({"to_do": self.to_do} if self.to_do else {}), "data": self.data}


def ok(topic: str, what: str, **data: Any) -> Finding:
    """A finding without a problem."""
    return Finding(topic, State.OK, what, data=data)


def warning(topic: str, what: str, to_do: str, **data: Any) -> Finding:
    """A finding with a problem that programs survive."""
    return Finding(topic, State.WARNING, what, to_do, data)


def wrong(topic: str, what: str, to_do: str, **data: Any) -> Finding:
    """A finding with a problem that makes programs fail."""
    return Finding(topic, State.WRONG, what, to_do, data)
