"""Recovery: takes snapshots of the servers, and goes back to the last one when a server has died.

A snapshot covers all servers, and is taken while no function is running: one agreed version. Each server's state is in
the shared memory of its machine (Ray's object store) and in that of the next server, which holds it; so it survives all
processes of a machine, and any one machine, and it never passes through the coordinator's process. When a server's
process dies, another one starts, all servers go back to the snapshot, and the functions since then run again. If a
process dies during that, it starts over. The last complete snapshot is kept until there is a newer one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from replicax.parameter_server.actors import TIMEOUT, Actor, ActorDiedError, Reply, ReplyLostError
from replicax.parameter_server.served_variables import VariableHome

_MOST_RECOVERIES = 10
_FUNCTIONS = 50
_SHARE = 1 / 40
_SECONDS_TO_ANSWER = 30.0
"""For a server whose process has started: it answers after earlier calls, which may move arrays, have ended."""


class Recovery:
    """Takes snapshots and restores them; see the module's docstring.

    ``start`` starts the process of a server; ``check`` raises if Ray itself has ended.
    """

    def __init__(self, home: VariableHome, start: Callable[[int], Actor], check: Callable[[], None]) -> None:
        self.home = home
        self._start = start
        self.check = check
        self.era = 0  # how many times servers have gone back, or started to
        self.tries = 0  # the same since another function has ended without an error
        self.stopped: str | None = None  # why to give up going back; set from any thread
        self._starting: set[int] = set()
        self._states: list[Reply] | None = None
        self._taken = time.monotonic()
        self._cost = 0.0
        self._due_since: float | None = None

    def is_due(self, functions: int) -> bool:
        """Return whether to take a snapshot as soon as no function is running.

        They take 1/40 of the time. After the program has assigned a variable, which would be lost, none is postponed.
        """
        if self.home.assigned:
            return True
        due = functions >= _FUNCTIONS and time.monotonic() - self._taken >= self._cost / _SHARE
        if due and self._due_since is None:
            self._due_since = time.monotonic()
        return due

    def snapshot(self) -> None:
        """Take a snapshot, while no function is running. If it fails, the previous one remains.

        Raises an ActorDiedError or TimeoutError if a server has died, or does not answer.
        """
        began = time.monotonic() if self._due_since is None else self._due_since
        self._states, self._due_since = self.home.servers.snapshots(), None
        self.home.saved()
        self._taken = time.monotonic()
        self._cost = self._taken - began

    def go_back(self) -> None:
        """Start new processes for dead servers, and make all servers go back, while no function is running.

        It tries again if a server dies meanwhile, and raises ``ActorDiedError`` if that can't succeed.
        """
        why = ""
        while True:
            self.check()
            if self.stopped is not None:
                raise ActorDiedError(self.stopped)
            if self.tries >= _MOST_RECOVERIES:
                times = f"they have died {self.tries} times without a function finished in between"
                raise ActorDiedError(times + why)
            self.tries += 1
            try:
                return self._try_to_go_back()
            except ReplyLostError as error:
                lost = f"their last snapshot is lost, with all machines that had it: {error}"
                raise ActorDiedError(lost) from None
            except (ActorDiedError, TimeoutError) as error:
                why = f"; the last time: {error}"

    def _try_to_go_back(self) -> None:
        actors = list(self.home.servers.actors)
        began = time.monotonic()
        for index, reply in enumerate([actor.call("ready") for actor in actors]):
            limit = began + (TIMEOUT if index in self._starting else _SECONDS_TO_ANSWER)
            try:
                reply.result(max(0.0, limit - time.monotonic()))
            except (ActorDiedError, TimeoutError):
                actors[index].kill()
                actors[index] = self._start(index)
                self._starting.add(index)
        self.era += 1
        self.home.servers.actors = tuple(actors)
        self.home.servers.restore([None] * len(actors) if self._states is None else self._states, self.era)
        self._starting.clear()
        self.home.resend()
        if self._states is not None:
            self.home.servers.keep(self._states)  # a server that kept one may have died
        self.home.definitions.define(("servers", 0), tuple(actors))
