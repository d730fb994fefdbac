"""A program: a few lines that are run on TensorFlow and on Replicax, and what is known about it beforehand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tests.oracle.library import Library

Body = Callable[[Library], Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """What to run, and whether the two libraries are meant to do the same.

    Attributes:
      topic: what it is about; with the title it names the program.
      title: what it does, in a few words.
      body: gets a library with a strategy, and returns anything that ``Library.to_plain`` understands, or raises.
      replicas: how many replicas the strategy has.
      differs: why Replicax means something else by it; ``None`` if the outcomes must agree. With a reason
        they must differ, so that no reason outlives its difference.
      not_yet: instead, what Replicax is meant to do as well, and does not do yet.
      executors_differ: why Replicax's own two executors do; ``None`` if they must agree with each other.
      own_process: whether it may leave a library in a state that disturbs other programs.
      servers: whether it needs parameter servers. Such programs share a process, and the servers, with no others.
    """

    topic: str
    title: str
    body: Body = dataclasses.field(repr=False)
    replicas: int = 2
    differs: str | None = None
    not_yet: str | None = None
    executors_differ: str | None = None
    own_process: bool = False
    servers: bool = False

    @property
    def name(self) -> str:
        return f"{self.topic}: {self.title}"


class Topic:
    """The programs about one thing, in the order in which they are written; all need parameter servers, or none."""

    def __init__(self, name: str, servers: bool = False) -> None:
        self.name = name
        self.servers = servers
        self.programs: list[Program] = []

    def program(
        self,
        title: str,
        *,
        replicas: int = 2,
        differs: str | None = None,
        not_yet: str | None = None,
        executors_differ: str | None = None,
        own_process: bool = False,
    ) -> Callable[[Body], Body]:
        """Decorate the body of a program."""

        def add(body: Body) -> Body:
            self.programs.append(
                Program(self.name, title, body, replicas, differs, not_yet, executors_differ, own_process, self.servers)
            )
            return body

        return add
