"""Findings: what a check has found, whether it is well, and what to do if it is not."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any


class State(enum.Enum):
    """Whether what was found is well."""

    OK = "ok"
    WARNING = "warning"
    """It works, but slowly, or not everywhere."""
    WRONG = "wrong"
    """Something will fail."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
      topic: what was looked at, in a word or two.
      state: whether it is well.
      what: what was found.
      to_do: what to change, if it is not well.
      data: the same for machines.
    """

    topic: str
    state: State
    what: str
    to_do: str = ""
    data: dict[str, Any] = dataclasses.field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The finding as plain data."""
        fields: dict[str, Any] = {"topic": self.topic, "state": self.state.value, "what": self.what}
        return {**fields, **({"to_do": self.to_do} if self.to_do else {}), "data": self.data}


def ok(topic: str, what: str, **data: Any) -> Finding:
    """A finding that is well."""
    return Finding(topic, State.OK, what, data=data)


def warning(topic: str, what: str, to_do: str, **data: Any) -> Finding:
    """A finding that is not well, and with which programs run."""
    return Finding(topic, State.WARNING, what, to_do, data)


def wrong(topic: str, what: str, to_do: str, **data: Any) -> Finding:
    """A finding with which something fails."""
    return Finding(topic, State.WRONG, what, to_do, data)
