"""A worker's access to the variables on the servers: fetches them before a step, and sends changes after it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
from jax import lax

from replicax import context
from replicax.collectives import ReduceOp
from replicax.devices.mesh import REPLICA_AXIS
from replicax.errors import ContextError
from replicax.execution.tracing.communicator import SpmdCommunicator
from replicax.parameter_server.actors import ActorDiedError, Reply, all_results
from replicax.parameter_server.server.messages import Changes, Ended, Push
from replicax.parameter_server.server.servers import Servers, split_changes
from replicax.parameter_server.server.shards import Shards
from replicax.parameter_server.worker.variables import WorkerVariable
from replicax.variables.slots import Slot
from replicax.variables.store import current_store
from replicax.variables.variable import Variable


class ServerVariables:
    """See :class:`replicax.workers.replicas.RemoteVariables`.

    A change is sent before the function reads anything else, so that it sees its own changes, and at its end.

    Attributes:
      groups: the number of workers that train synchronously; 1 in asynchronous mode.
      shards: of each variable, by number.
      built: the pytree of the variables of each optimizer that has been built, by number.
      roles: the purpose of each slot of the worker's variables.
      group: for synchronous workers: a variable with the worker's place in the present step.
    """

    group: Variable

    def __init__(self, servers: Servers, groups: int) -> None:
        self.servers = servers
        servers.ended = lambda: self._ended
        self.groups = groups
        self.shards: dict[int, Shards] = {}
        self.built: dict[int, Any] = {}
        self.roles: dict[Slot, tuple[str, WorkerVariable, Any]] = {}
        self._parts = threading.local()

    # --- functions --------------------------------------------------------------------------------------

    def begin(self, function: int, ended: Ended) -> None:
        """Begin a scheduled function; ``ended`` are those that had ended when it was sent."""
        self._function, self._ended = function, ended
        self._pushes = 0
        self._unsent: list[tuple[Changes, dict[int, int]]] = []
        self._sent: list[dict[int, Reply]] = []
        self._changed: set[int] = set()
        self._updates: dict[int, int] = {}  # how many each server had made when the function last read from it
        if self.groups > 1:
            self.group.slot.array = self.group.to_storage(np.int32(function % self.groups))

    def change(self, changes: Changes) -> None:
        """Add changes, to be sent later. The memory of their arrays must not be written to."""
        self._changed.update(number for _, number in changes)
        self._unsent.append((changes, dict(self._updates)))

    def send(self) -> None:
        """Send the changes, one call for each server and change; does not wait."""
        unsent, self._unsent = self._unsent, []
        for changes, updates in unsent:
            pushes = {
                server: Push(self._function, self._pushes, updates.get(server), mine, self._ended)
                for server, mine in split_changes(self.shards, changes).items()
            }
            self._pushes += 1
            self._sent.append(self.servers.push(pushes))

    def end(self) -> None:
        """End the function; the variables that it returns are read from the servers, changed or not."""
        self._changed.clear()

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
                name = f"parameter server {server}"
                try:
                    largest = max(largest, *all_results([reply], lambda _, name=name: name))  # type: ignore[misc]
                except Exception as error:  # the other servers must still apply theirs
                    problems.append(error)
            staleness.append(largest)
        for problem in sorted(problems, key=lambda error: not isinstance(error, ActorDiedError | TimeoutError)):
            raise problem
        return tuple(staleness)

    def forget(self, number: int, variable: WorkerVariable | None) -> None:
        """Forget a dropped variable."""
        self.shards.pop(number, None)
        self.servers.forget(number)
        if variable is not None:
            for slot in [slot for slot, (_, of, _) in self.roles.items() if of is variable]:
                del self.roles[slot]

    # --- around a program -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def synchronized(self, read: Any, written: Any) -> Iterator[None]:
        """See :class:`replicax.workers.replicas.RemoteVariables`."""
        self.bring(read)
        yield
        self._send(written)

    def bring(self, slots: Iterable[Slot]) -> None:
        """Fetch the servers' present values into these slots."""
        roles = [self.roles[slot] for slot in slots if slot in self.roles]
        wanted = {variable.number_on_servers: variable for kind, variable, _ in roles if kind == "value"}
        if not wanted:
            return
        for variable in wanted.values():
            self.check_readable(variable)
        self.send()
        shards = {number: self.shards[number] for number in wanted}
        values, updates = self.servers.pull(shards, lambda number: wanted[number].slot.array)
        for number, value in values.items():
            variable = wanted[number]
            variable.slot.array = variable.to_storage(value)  # JAX keeps this memory, and copies before writing
        self._updates.update(updates)

    def check_readable(self, variable: WorkerVariable) -> None:
        """Raise if a function that is part of a step reads what it has changed: the servers change that after the step.

        Raises:
          ContextError: it does.
        """
        if self.groups > 1 and variable.number_on_servers in self._changed:
            raise ContextError(
                f"a scheduled function has changed {variable.describe()}, and now reads it. With mode='sync' a "
                "function is one part of one step, and what it changes is changed when all functions of the step have "
                "ended. Call strategy.run once in a function, and schedule a function for each step; read the variable "
                "before the change, in a later function, or in the program that schedules."
            )

    def rows(self, number: int, indices: np.ndarray) -> np.ndarray:
        """Rows of a variable: ``[*indices.shape, *shape[1:]]``; each is fetched once."""
        self.send()
        unique, places = np.unique(indices, return_inverse=True)
        rows, updates = self.servers.rows(number, self.shards[number], unique)
        self._updates.update(updates)
        return rows[places.reshape(indices.shape)]

    def _send(self, slots: Iterable[Slot]) -> None:
        """Send what a program has written into these slots."""
        changes: dict[tuple[int | str, int], Any] = {}
        rows: dict[tuple[int, int], dict[int, Any]] = {}
        for slot in slots:
            if slot not in self.roles:
                continue
            kind, variable, detail = self.roles[slot]
            number, array = variable.number_on_servers, slot.array
            if kind == "value":
                changes["assigned", number] = array
                self.servers.overwrite(number)
            elif kind == "added":
                changes["added", number] = array
            elif kind == "gradient":
                changes[detail[0], number] = array
            else:
                rows.setdefault((detail[0], number), {})[detail[1]] = array
        for key, found in rows.items():
            changes[key] = found[0], found[1]
        for of, number in list(changes):
            if of == "added":  # the new value is the old one plus the added change
                changes.pop(("assigned", number), None)
            elif of == "assigned" and (of, number) in changes:
                # The next program may take over the memory of values; no other code holds the notes.
                changes[of, number] = np.array(changes[of, number])
        if changes:
            self.change(changes)

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
        if self.groups == 1:
            return SpmdCommunicator(examples, options)
        group = self.group
        return GroupCommunicator(
            examples,
            options,
            self.groups,
            lambda: current_store().read(group),
            lambda: getattr(self._parts, "depth", 0) > 0,
        )


# --- collectives of workers that train synchronously --------------------------------------------------


class GroupCommunicator(SpmdCommunicator):
    """Collectives among the replicas of one worker, for a step in which other workers take part.

    The workers combine values only on the servers, after the step. So a collective inside a step is impossible, and
    would be wrong among the replicas of one worker alone: it raises. The two collectives that the servers complete, the
    sum of gradients and assigned values, set ``is_part``. ``group`` returns the number of this worker, traced.
    """

    def __init__(
        self,
        examples: Any,
        options: context.Options,
        groups: int,
        group: Callable[[], Any],
        is_part: Callable[[], bool],
    ) -> None:
        super().__init__(examples, options)
        self._groups = groups
        self._group = group
        self._is_part = is_part

    def _check_part(self, what: str) -> None:
        if not self._is_part():
            _refuse(what)

    def replica_id(self) -> Any:
        return lax.axis_index(REPLICA_AXIS) + self._group() * lax.axis_size(REPLICA_AXIS)

    def add_up(self, count: int) -> int:
        return super().add_up(count) * self._groups

    def all_reduce(self, op: ReduceOp, arrays: Sequence[Any], options: context.Options = None) -> list[Any]:
        self._check_part("all_reduce")
        return super().all_reduce(op, arrays, options)

    def sum_of_own(self, arrays: Sequence[Any], options: context.Options = None) -> list[Any]:
        return self.all_reduce(ReduceOp.SUM, arrays, options)

    def all_gather(self, array: Any, axis: int, options: context.Options = None) -> Any:
        self._check_part("all_gather")
        return super().all_gather(array, axis, options)

    def from_first(self, array: Any) -> Any:
        self._check_part("a value of the first replica")
        return super().from_first(array)

    def components(self, value: Any) -> Sequence[Any]:
        _refuse("the replicas' components")

    def merge(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        _refuse("merge_call")


def _refuse(what: str) -> NoReturn:
    raise ContextError(
        f"{what} was asked for in a step of ParameterServerStrategy(mode='sync'), whose replicas are on several "
        "workers, which meet only on the servers, after the step. Optimizer.apply_gradients and variables with an "
        "aggregation combine there. Return other values from the scheduled function and combine them after fetch(); or "
        "use MultiWorkerMirroredStrategy, whose replicas meet inside steps."
    )
