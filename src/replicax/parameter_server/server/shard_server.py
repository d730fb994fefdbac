"""A parameter server: has parts of variables, and applies updates to them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from replicax.parameter_server.pickling import Reference
from replicax.parameter_server.server.messages import Ended, OptimizerPart, Pulled, Push, Rows, ServerState, Version
from replicax.parameter_server.server.optimizer_update import update_of
from replicax.variables.aggregation import Aggregation

Part = np.ndarray | jax.Array


class ShardServer:
    """Stores parts of variables, and applies the pushes of workers: each push once, however often it arrives.

    Ray pickles the result of a method before it calls the next one: so results may be the server's own arrays, which
    later updates write to.

    With ``groups=1`` each push is an update. Otherwise the pushes of functions ``k * groups`` to
    ``(k + 1) * groups - 1``, those of one step, are combined, and wait until all of these functions have ended. Until
    then all of them read the values before the step, even one that runs again. There is no separate call for that: each
    call says which functions have ended.
    """

    def __init__(self, groups: int, settings: Mapping[str, Any]) -> None:
        for name, value in settings.items():
            jax.config.update(name, value)
        self._groups = groups
        self._state = ServerState()
        self._optimizers: dict[int, tuple[OptimizerPart, Callable[..., Any]]] = {}
        self._kept: list[ServerState] = []

    def ready(self) -> int:
        """The id of its process; answers once it has started."""
        return os.getpid()

    # --- setup ------------------------------------------------------------------------------------------

    def put(self, values: Mapping[int, tuple[Part, str]], ended: Ended) -> None:
        """Set parts of variables, each with its way to combine what several replicas assign."""
        self._finish(ended)
        for number, (value, aggregation) in values.items():
            self._set(number, np.array(value))
            self._state.aggregations[number] = Aggregation(aggregation)

    def drop(self, references: Sequence[Reference]) -> None:
        """Forget these objects, of which it may have some."""
        state = self._state
        tables = {"variable": (state.values, state.versions, state.aggregations), "optimizer": (self._optimizers,)}
        for kind, number in references:
            for table in tables.get(kind, ()):
                table.pop(number, None)

    def define(self, optimizer: OptimizerPart) -> None:
        """Define an optimizer. Snapshots are without it."""
        tree = jax.tree_util.tree_structure(optimizer.tree)
        self._optimizers[optimizer.number] = optimizer, jax.jit(update_of(optimizer.transformation, tree))

    # --- the state as a whole ---------------------------------------------------------------------------

    def snapshot(self, ended: Ended) -> ServerState:
        """The complete state."""
        self._finish(ended)
        values = {number: np.asarray(value) for number, value in self._state.values.items()}
        return dataclasses.replace(self._state, values=values)

    def restore(self, state: ServerState | None, era: int) -> None:
        """Replace the state by an earlier one; ``None``: an empty one. Ignores messages of other eras from now on."""
        state = state or ServerState()
        self._state = dataclasses.replace(state, ended=Ended(era, state.ended.below))

    def keep(self, state: ServerState) -> None:
        """Store the state of a neighbour, in addition to the previous one, as the others may not get theirs."""
        self._kept.append(state)

    def keep_last(self) -> None:
        """Drop the previous states: all servers have stored new ones."""
        del self._kept[:-1]

    # --- reading and pushing ----------------------------------------------------------------------------

    def pull(self, known: Mapping[int, Version | None], ended: Ended) -> Pulled:
        """The parts of these variables whose versions are not those that the caller has."""
        self._finish(ended)
        values, versions = self._state.values, self._state.versions
        newer = [number for number, version in known.items() if number in values and versions[number] != version]
        return Pulled(self._state.updates, {number: (versions[number], np.asarray(values[number])) for number in newer})

    def rows(self, number: int, indices: np.ndarray, ended: Ended) -> tuple[int, np.ndarray]:
        """The number of updates so far, and some rows of its part of a variable."""
        self._finish(ended)
        return self._state.updates, np.asarray(self._state.values[number])[indices]

    def push(self, push: Push) -> int:
        """Change the parts, now or when the step is complete; returns the number of updates since the function's read.

        A repeated push changes nothing; nor does one that arrives after its function has ended on another worker, or
        after the servers have gone back.
        """
        self._finish(push.ended)
        key, state = (push.function, push.number), self._state
        if push.ended.era != state.ended.era or push.function < state.ended.below or key in state.seen:
            return 0
        state.seen.add(key)
        staleness = 0 if push.based_on is None else state.updates - push.based_on
        if self._groups == 1:
            self._update([push])
        else:
            state.waiting.setdefault((push.function // self._groups, push.number), {})[push.function] = push
        return staleness

    def break_off(self, ended: Ended) -> None:
        """Drop waiting pushes after a step has failed, except those of complete steps."""
        self._finish(ended)
        self._state.waiting.clear()

    # --- updates ----------------------------------------------------------------------------------------

    def _finish(self, ended: Ended) -> None:
        """Apply complete steps when these functions have ended."""
        state = self._state
        if ended.era != state.ended.era or ended.below <= state.ended.below:
            return
        state.ended = ended
        state.seen = {seen for seen in state.seen if seen[0] >= ended.below}
        for step in sorted(step for step in state.waiting if (step[0] + 1) * self._groups <= ended.below):
            together = state.waiting.pop(step)
            self._update([together[function] for function in sorted(together)])

    def _update(self, pushes: Sequence[Push]) -> None:
        """Apply one update: the pushes of one step, in the order of their replicas."""
        self._state.updates += 1
        changes_by_kind: dict[int | str, dict[int, list[Any]]] = {"added": {}, "assigned": {}}
        for push in pushes:
            for (kind, number), change in push.changes.items():
                changes_by_kind.setdefault(kind, {}).setdefault(number, []).append(change)
        added, assigned, values = changes_by_kind.pop("added"), changes_by_kind.pop("assigned"), self._state.values
        for optimizer, gradients in changes_by_kind.items():
            if optimizer in self._optimizers:  # the program may have dropped it meanwhile, and variables, too
                self._optimize(*self._optimizers[int(optimizer)], gradients)
        for number in added.keys() & values.keys():
            self._set(number, self._with_added(number, self._combined_values(number, added[number])))
        for number in assigned.keys() & values.keys():
            [value] = self._combined_values(number, assigned[number])
            self._set(number, np.array(value) if value.flags.writeable else value)  # others may share it

    def _combined_values(self, number: int, values: list[Any]) -> list[Any]:
        """The values that the groups of replicas of one step add or assign, combined by the variable's aggregation."""
        how = self._state.aggregations[number]
        if len(values) == 1 or how in (Aggregation.NONE, Aggregation.ONLY_FIRST_REPLICA):
            return values[:1]
        if any(isinstance(value, tuple) for value in values):
            scale = len(values) if how is Aggregation.MEAN else 1
            return [(indices, rows / scale if scale > 1 else rows) for indices, rows in values]
        total = _add(np.array(values[0]), values[1:])
        return [(total / len(values)).astype(total.dtype) if how is Aggregation.MEAN else total]

    def _optimize(
        self,
        optimizer: OptimizerPart,
        update: Callable[..., Any],
        gradients: Mapping[int, Sequence[np.ndarray | Rows]],
    ) -> None:
        variables = jax.tree_util.tree_leaves(optimizer.tree)
        values, state = (
            [self._state.values[n] if n in self._state.values else optimizer.empty[n] for n in numbers]
            for numbers in (variables, optimizer.slots)
        )
        dense = [_dense_sum(gradients.get(n, ()), value) for n, value in zip(variables, values, strict=True)]
        new_values, new_state = update(dense, values, state)
        for n, value in zip((*variables, *optimizer.slots), (*new_values, *new_state), strict=True):
            if n in self._state.values:
                self._set(n, value)

    def _with_added(self, number: int, deltas: Iterable[np.ndarray | Rows]) -> np.ndarray:
        """The sum; in the value's own memory, if no other object refers to it."""
        value: Any = self._state.values[number]
        is_own = isinstance(value, np.ndarray) and value.flags.writeable and value.flags.owndata
        return _add(value if is_own else np.array(value), deltas)

    def _set(self, number: int, value: Part) -> None:
        state = self._state
        state.values[number] = value
        _, count = state.versions.get(number, (0, 0))
        state.versions[number] = state.ended.era, count + 1


def _add(total: np.ndarray, changes: Iterable[np.ndarray | Rows]) -> np.ndarray:
    """Add arrays and rows to an array, in its memory."""
    for change in changes:
        if isinstance(change, tuple):
            np.add.at(total, *change)
        else:
            np.add(total, change, out=total, casting="unsafe")
    return total


def _dense_sum(gradients: Sequence[np.ndarray | Rows], like: Part) -> np.ndarray:
    """The sum of gradients, as an array like ``like``."""
    if len(gradients) == 1 and not isinstance(gradients[0], tuple):
        return gradients[0]
    return _add(np.zeros(like.shape, like.dtype), gradients)
