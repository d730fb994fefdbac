"""The reads and changes of one scheduled function on the servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from replicax.parameter_server.actors import ActorDiedError, all_results
from replicax.parameter_server.server.messages import Ended, Push
from replicax.parameter_server.server.servers import Sent, Servers, split_changes
from replicax.parameter_server.server.shards import Shards

Change = tuple[Mapping[int, Mapping[int, Any]], Mapping[int, Any], Mapping[int, Any]]
"""Gradients by optimizer and variable; changes to add, and new values, by variable."""


class FunctionTraffic:
    """Sends the changes of a function to the servers.

    A change is sent before the function reads anything else, so that it sees its own changes, and at its end.

    Args:
      servers: all servers.
      shards: of each variable, by number.
      function: its number.
      ended: the functions that had ended when it was sent.

    Attributes:
      ended: the same.
      changed: the numbers of the variables that it has changed.
      updates: how many updates each server had made when the function last read from it.
    """

    def __init__(self, servers: Servers, shards: Mapping[int, Shards], function: int, ended: Ended) -> None:
        self._servers = servers
        self._shards = shards
        self._function = function
        self.ended = ended
        self._pushes = 0
        self._unsent: list[tuple[Change, dict[int, int]]] = []
        self._sent: list[Sent] = []
        self.changed: set[int] = set()
        self.updates: dict[int, int] = {}

    def change(self, gradients: Mapping[int, Mapping[int, Any]], added: Any, assigned: Any) -> None:
        """Add a change, to be sent later. The memory of its arrays must not be written to."""
        self.changed.update(*gradients.values(), added, assigned)
        self._unsent.append(((gradients, added, assigned), dict(self.updates)))

    def send(self) -> None:
        """Send the changes, one call for each server and change; does not wait."""
        unsent, self._unsent = self._unsent, []
        for change, updates in unsent:
            shared = split_changes(self._shards, *jax.tree_util.tree_map(np.asarray, change))
            pushes = {
                server: Push(self._function, self._pushes, updates.get(server), *mine, self.ended)
                for server, mine in shared.items()
            }
            self._pushes += 1
            self._sent.append(self._servers.push(pushes))

    def settle(self) -> tuple[int, ...]:
        """Send the remaining changes, and wait until all are applied, even if one fails.

        Returns:
          The largest staleness of each.

        Raises:
          ActorDiedError, TimeoutError: a server has died, or does not answer.
          Exception: raised by a server.
        """
        self.send()
        problems: list[Exception] = []
        staleness = []
        for sent in self._sent:
            largest = 0
            for server, reply in sent.items():
                try:
                    largest = max(largest, *all_results([reply], lambda _, server=server: f"parameter server {server}"))  # type: ignore[misc]
                except Exception as error:  # the other servers must still apply theirs
                    problems.append(error)
            staleness.append(largest)
        for problem in sorted(problems, key=lambda error: not isinstance(error, ActorDiedError | TimeoutError)):
            raise problem
        return tuple(staleness)
