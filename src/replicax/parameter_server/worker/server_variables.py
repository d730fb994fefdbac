"""A worker's access to the variables on the servers: fetches them before a step, and sends changes after it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from replicax import context
from replicax.errors import ContextError
from replicax.execution.tracing.communicator import SpmdCommunicator
from replicax.parameter_server.server.messages import Ended
from replicax.parameter_server.server.servers import Servers
from replicax.parameter_server.server.shards import Shards
from replicax.parameter_server.worker.function_traffic import FunctionTraffic
from replicax.parameter_server.worker.group_communicator import GroupCommunicator
from replicax.parameter_server.worker.variables import WorkerVariable
from replicax.variables.slots import Slot
from replicax.variables.store import current_store
from replicax.variables.variable import Variable


class ServerVariables:
    """See :class:`replicax.workers.replicas.RemoteVariables`.

    Args:
      servers: with the variables.
      groups: the number of workers that train synchronously; 1 in asynchronous mode.

    Attributes:
      shards: of each variable, by number.
      roles: the purpose of each slot of the worker's variables.
      group: for synchronous workers: a variable with the worker's place in the present step.
      traffic: of the running function.
    """

    group: Variable
    traffic: FunctionTraffic

    def __init__(self, servers: Servers, groups: int) -> None:
        self.servers = servers
        servers.ended = lambda: self.traffic.ended
        self._groups = groups
        self.shards: dict[int, Shards] = {}
        self.roles: dict[Slot, tuple[str, WorkerVariable, Any]] = {}
        self._built: dict[int, Any] = {}
        self._parts = threading.local()

    @property
    def groups(self) -> int:
        return self._groups

    # --- functions --------------------------------------------------------------------------------------

    def begin(self, function: int, ended: Ended) -> FunctionTraffic:
        """Begin a scheduled function."""
        self.traffic = FunctionTraffic(self.servers, dict(self.shards), function, ended)
        if self._groups > 1:
            self.group.slot.array = self.group.to_storage(np.int32(function % self._groups))
        return self.traffic

    def end(self) -> None:
        """End the function; the variables that it returns are read from the servers, changed or not."""
        self.traffic.changed.clear()

    def forget(self, number: int, variable: WorkerVariable | None) -> None:
        """Forget a dropped variable."""
        self.shards.pop(number, None)
        self.servers.forget(number)
        if variable is not None:
            for slot in [slot for slot, (_, of, _) in self.roles.items() if of is variable]:
                del self.roles[slot]

    def note_built(self, optimizer: int, variables: Any) -> None:
        """Note that an optimizer has been built for the variables of this pytree."""
        self._built[optimizer] = variables

    def forget_built(self, optimizer: int) -> None:
        """Forget a dropped optimizer."""
        self._built.pop(optimizer, None)

    def built(self, optimizer: int) -> Any:
        """The pytree of an optimizer's variables; ``None`` if it has not been built."""
        return self._built.get(optimizer)

    # --- around a program -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def synchronized(self, read: Any, written: Any) -> Iterator[None]:
        """See :class:`replicax.workers.replicas.RemoteVariables`."""
        self.bring(read)
        yield
        self._send(written)

    def bring(self, slots: Iterable[Slot]) -> None:
        """Fetch the servers' present values into these slots."""
        wanted = {}
        for slot in slots:
            kind, variable, _ = self.roles.get(slot, (None, None, None))
            if kind == "value" and variable is not None:
                wanted[variable.number_on_servers] = variable
        if not wanted:
            return
        for variable in wanted.values():
            self.check_readable(variable)
        self.traffic.send()
        shards = {number: self.shards[number] for number in wanted}
        values, updates = self.servers.pull(shards, lambda number: wanted[number].slot.array)
        for number, value in values.items():
            variable = wanted[number]
            variable.slot.array = variable.to_storage(value)  # JAX keeps this memory, and copies before writing
        self.traffic.updates.update(updates)

    def check_readable(self, variable: WorkerVariable) -> None:
        """Raise if a function that is part of a step reads what it has changed: the servers change that after the step.

        Raises:
          ContextError: it does.
        """
        if self._groups > 1 and variable.number_on_servers in self.traffic.changed:
            raise ContextError(
                f"a scheduled function has changed {variable.describe()}, and now reads it. With mode='sync' a "
                "function is one part of one step, and what it changes is changed when all functions of the step have "
                "ended. Call strategy.run once in a function, and schedule a function for each step; read the variable "
                "before the change, in a later function, or in the program that schedules."
            )

    def rows(self, number: int, indices: np.ndarray) -> np.ndarray:
        """Rows of a variable, with unique indices: ``[*indices.shape, *shape[1:]]``."""
        self.traffic.send()
        unique, places = np.unique(indices, return_inverse=True)
        rows, updates = self.servers.rows(number, self.shards[number], unique)
        self.traffic.updates.update(updates)
        return rows[places.reshape(indices.shape)]

    def _send(self, slots: Iterable[Slot]) -> None:
        """Send what a program has written into these slots."""
        gradients: dict[int, dict[int, Any]] = {}
        added: dict[int, Any] = {}
        assigned: dict[int, Any] = {}
        rows: dict[tuple[int, int], dict[int, Any]] = {}
        for slot in slots:
            if slot not in self.roles:
                continue
            kind, variable, detail = self.roles[slot]
            number, array = variable.number_on_servers, slot.array
            if kind == "value":
                assigned[number] = array
                self.servers.overwrite(number)
            elif kind == "added":
                added[number] = array
            elif kind == "gradient":
                gradients.setdefault(detail[0], {})[number] = array
            else:
                rows.setdefault((detail[0], number), {})[detail[1]] = array
        for (optimizer, number), found in rows.items():
            gradients.setdefault(optimizer, {})[number] = found[0], found[1]
        for number in added:
            assigned.pop(number, None)  # its new value is the old one plus the added change
        if gradients or added or assigned:
            # The next program may take over the memory of values; no other code holds the notes.
            self.traffic.change(gradients, added, {number: np.array(array) for number, array in assigned.items()})

    # --- collectives ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """Mark the collectives inside as first halves that the servers complete."""
        before = getattr(self._parts, "depth", 0)
        self._parts.depth = before + 1
        try:
            yield
        finally:
            self._parts.depth = before

    def communicator(self, examples: Any, options: context.Options) -> SpmdCommunicator:
        """See :class:`replicax.workers.replicas.RemoteVariables`."""
        if self._groups == 1:
            return SpmdCommunicator(examples, options)
        return GroupCommunicator(examples, options, self._groups, self._group, self._is_part)

    def _group(self) -> Any:
        return current_store().read(self.group)

    def _is_part(self) -> bool:
        return getattr(self._parts, "depth", 0) > 0
