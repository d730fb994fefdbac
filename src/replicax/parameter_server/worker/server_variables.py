"""A worker's access to the variables on the servers: fetches them before a step, and sends changes after it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

from replicax.errors import ContextError
from replicax.parameter_server.actors import Reply, all_results
from replicax.parameter_server.server.messages import Changes, Ended, Push
from replicax.parameter_server.server.servers import Servers, split_changes
from replicax.parameter_server.server.shards import Shards
from replicax.parameter_server.worker.variables import WorkerVariable, in_run, is_part
from replicax.variables.slots import Slot
from replicax.variables.store import current_store
from replicax.variables.variable import Variable


class ServerVariables:
    """See :class:`replicax.workers.replicas.RemoteVariables`.

    Changes are sent at once, so that the function sees its own changes when it reads afterwards.
    """

    group: Variable  # for synchronous workers: has the worker's place in the present step

    def __init__(self, servers: Servers, groups: int) -> None:
        self.servers = servers
        servers.ended = lambda: self._ended
        self.groups = groups  # the number of workers that train synchronously; 1 in asynchronous mode
        self.shards: dict[int, Shards] = {}  # of each variable, by number
        # For each slot of the worker's variables: the variable, the kind of change that is written there (see
        # Changes), and all slots with this change: for rows those of their indices and of the rows.
        self.roles: dict[Slot, tuple[WorkerVariable, int | str, list[Slot]]] = {}

    # --- functions --------------------------------------------------------------------------------------

    def begin(self, function: int, ended: Ended) -> None:
        """Begin a scheduled function; ``ended`` are those that had ended when it was sent."""
        self._function, self._ended = function, ended
        self._sent: list[dict[int, Reply]] = []
        self._changed: set[int] = set()
        self.servers.updates = {}
        if self.groups > 1:
            self.group.slot.array = self.group.to_storage(np.int32(function % self.groups))

    def change(self, changes: Changes) -> None:
        """Send changes, in one call for each server; does not wait."""
        self._changed.update(number for _, number in changes)
        pushes = {
            server: Push(self._function, len(self._sent), self.servers.updates.get(server), mine, self._ended)
            for server, mine in split_changes(self.shards, changes).items()
        }
        self._sent.append(self.servers.push(pushes))

    def end(self) -> None:
        """End the function; the variables that it returns are read from the servers, changed or not."""
        self._changed.clear()

    def settle(self) -> tuple[int, ...]:
        """Wait until all changes are applied, even if one fails; returns the staleness of each."""
        servers = [f"parameter server {server}" for sent in self._sent for server in sent]
        replies = [reply for sent in self._sent for reply in sent.values()]
        found = iter(all_results(replies, servers))
        return tuple(max(0, *itertools.islice(found, len(sent))) for sent in self._sent)

    def forget(self, number: int, variable: WorkerVariable | None) -> None:
        """Forget a dropped variable."""
        self.shards.pop(number, None)
        self.servers.forget(number)
        self.roles = {slot: role for slot, role in self.roles.items() if role[0] is not variable}

    # --- around a step ----------------------------------------------------------------------------------

    def bring(self, slots: Iterable[Slot]) -> None:
        roles = [self.roles[slot] for slot in slots if slot in self.roles]
        by_number = {variable.number_on_servers: variable for variable, kind, _ in roles if kind == "assigned"}
        if not by_number:
            return
        for variable in by_number.values():
            self.check_readable(variable)
        shards = {number: self.shards[number] for number in by_number}
        values = self.servers.pull(shards, lambda number: by_number[number].slot.array)
        for number, value in values.items():
            variable = by_number[number]
            variable.slot.array = variable.to_storage(value)  # JAX keeps this memory, and copies before writing

    def check_readable(self, variable: WorkerVariable) -> None:
        """Raise if a function that is part of a step reads what it has changed: the servers change that after it."""
        if self.groups > 1 and variable.number_on_servers in self._changed:
            raise ContextError(
                f"a scheduled function has changed {variable.describe()}, and now reads it. With mode='sync' a "
                "function is one part of one step, and what it changes is changed when all functions of the step have "
                "ended. Call strategy.run once in a function, and schedule a function for each step; read the variable "
                "before the change, in a later function, or in the program that schedules."
            )

    def rows(self, number: int, indices: np.ndarray) -> np.ndarray:
        """Rows of a variable: ``[*indices.shape, *shape[1:]]``; each is fetched once."""
        unique, places = np.unique(indices, return_inverse=True)
        rows = self.servers.rows(number, self.shards[number], unique)
        return rows[places.reshape(indices.shape)]

    def send(self, slots: Iterable[Slot]) -> None:
        changes: dict[tuple[int | str, int], Any] = {}
        for slot in slots:
            variable, kind, group = self.roles[slot]
            number = variable.number_on_servers
            if kind == "assigned":
                self.servers.forget(number)
            arrays = tuple(one.array for one in group)
            changes[kind, number] = arrays if len(arrays) > 1 else arrays[0]
        for number in [number for kind, number in changes if kind == "added"]:
            changes.pop(("assigned", number), None)  # the new value is the old one plus the added change
        if changes:
            self.change(changes)

    # --- collectives ------------------------------------------------------------------------------------

    def communicator(self, here: Any, count: int) -> Any:
        return here if self.groups == 1 or not in_run.get() else GroupCommunicator(here, count, self)


# --- collectives of workers that train synchronously --------------------------------------------------

_COLLECTIVES = {
    "all_reduce": "all_reduce",
    "sum_unless_reduced": "all_reduce",
    "all_gather": "all_gather",
    "from_first": "a value of the first replica",
    "components": "the replicas' components",
    "merge": "merge_call",
}
"""The methods of a communicator that combine the replicas' values, and their names in messages."""


class GroupCommunicator:
    """Collectives among the replicas of one worker, for a step in which other workers take part.

    The workers combine values only on the servers, after the step. So a collective inside a step is impossible, and
    would be wrong among the ``count`` replicas of one worker alone: it raises. The two collectives that the servers
    complete, the sum of gradients and assigned values, are called with :data:`is_part`; what they and all else do among
    these replicas, ``here`` does.
    """

    def __init__(self, here: Any, count: int, server_variables: ServerVariables) -> None:
        self._here, self._count = here, count
        self._server_variables = server_variables
        if here.examples is not None:
            here.examples = here.examples._replace(count=here.examples.count * server_variables.groups)

    def __getattr__(self, name: str) -> Any:
        if name in _COLLECTIVES and (name in ("components", "merge") or not is_part.get()):
            return functools.partial(_refuse, _COLLECTIVES[name])
        return getattr(self._here, name)

    def replica_id(self) -> Any:
        group = current_store().read(self._server_variables.group)
        return self._here.replica_id() + group * self._count

    def add_up(self, count: int) -> Any:
        return self._here.add_up(count) * self._server_variables.groups


def _refuse(what: str, *_: Any, **__: Any) -> NoReturn:
    raise ContextError(
        f"{what} was asked for in a step of ParameterServerStrategy(mode='sync'), whose replicas are on several "
        "workers, which meet only on the servers, after the step. Optimizer.apply_gradients and variables with an "
        "aggregation combine there. Return other values from the scheduled function and combine them after fetch(); or "
        "use MultiWorkerMirroredStrategy, whose replicas meet inside steps."
    )
