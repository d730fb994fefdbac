"""Snapshots of the servers, and going back to the last one when a server has died.

A snapshot is taken when no function is running, of all servers together: one agreed version. Each server's state is in
the shared memory of its machine (Ray's object store) and in that of the next server, which holds it; so it outlives all
processes of a machine, and any one machine, and it never comes to the coordinator's process. When a server's process
has died, another is started, all servers go back to the snapshot, and the functions that have been run since are run
again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from replicax.parameter_server.definitions import Definitions
from replicax.parameter_server.engine.actors import Actor, ActorDiedError, Reply, all_results
from replicax.parameter_server.served_variables import VariableHome
from replicax.parameter_server.serving.servers import Servers

_FUNCTIONS = 50
_SHARE = 1 / 40


class Recovery:
    """See the module's docstring.

    Args:
      servers: all of them, as the coordinator sees them.
      home: the variables that are on them.
      definitions: what workers are told, here of new servers.
      start: starts the process of a server.
    """

    def __init__(
        self, servers: Servers, home: VariableHome, definitions: Definitions, start: Callable[[int], Actor]
    ) -> None:
        self._servers = servers
        self._home = home
        self._definitions = definitions
        self._start = start
        self._states: list[Reply] | None = None
        self._taken = time.monotonic()
        self._cost = 0.0
        self._due_since: float | None = None

    def is_due(self, functions: int) -> bool:
        """Whether it is time for a snapshot, as soon as no function is running.

        That is after some functions, and so seldom that it takes 1/40 of the time; or if the program has assigned a
        variable, which would be lost.

        Args:
          functions: how many have been run since the last one.
        """
        if functions and self._home.has_assigned:
            return True
        due = functions >= _FUNCTIONS and time.monotonic() - self._taken >= self._cost / _SHARE
        if due and self._due_since is None:
            self._due_since = time.monotonic()
        return due

    def snapshot(self) -> None:
        """Take one; no function is running.

        Raises:
          ActorDiedError: a server has died.
        """
        began = time.monotonic() if self._due_since is None else self._due_since
        mark = self._home.mark()
        self._states, self._due_since = self._servers.snapshots(), None
        self._home.saved(mark)
        self._taken = time.monotonic()
        self._cost = self._taken - began

    def go_back(self) -> None:
        """Start the servers that have died, and have all of them go back; no function is running.

        Raises:
          ActorDiedError: a server that has just been started has died, or a snapshot is lost.
        """
        actors = list(self._servers.actors)
        for index, reply in enumerate([actor.call("ready") for actor in actors]):
            try:
                all_results([reply], lambda _, index=index: f"parameter server {index}")  # type: ignore[misc]
            except (ActorDiedError, TimeoutError):
                actors[index].kill()
                actors[index] = self._start(index)
        self._servers.replace(actors)
        states = [None] * len(actors) if self._states is None else self._states
        replies = [actor.call("restore", state) for actor, state in zip(actors, states, strict=True)]
        all_results(replies, lambda i: f"parameter server {i}")
        self._home.put_again()
        self._definitions.add_servers(actors)
