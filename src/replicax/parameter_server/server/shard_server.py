"""A parameter server: has parts of variables, and applies updates to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from replicax.parameter_server.server.messages import Ended, OptimizerPart, Pulled, Push, Rows, ServerState
from replicax.parameter_server.server.optimizer_update import update_of
from replicax.variables.aggregation import Aggregation

Part = np.ndarray | jax.Array


class ShardServer:
    """Stores parts of variables, and applies the pushes of workers: each push once, however often it arrives.

    The engine pickles the result of a method before it calls the next one: so results may be the server's own arrays,
    which later updates write to.

    Args:
      index: its number.
      groups: the number of functions of one step. With 1 each push is an update. Otherwise the pushes of functions
        ``k * groups`` to ``(k + 1) * groups - 1`` are combined, and wait until all of these functions have ended.
        Until then all of them read the values before the step, even one that runs again. There is no separate call
        for that: each call says which functions have ended.
      settings: JAX's settings, the same as the coordinator's.
    """

    def __init__(self, index: int, groups: int, settings: Mapping[str, Any]) -> None:
        for name, value in settings.items():
            jax.config.update(name, value)
        self.index = index
        self._groups = groups
        self._values: dict[int, Part] = {}
        self._versions: dict[int, int] = {}
        self._aggregations: dict[int, Aggregation] = {}
        self._optimizers: dict[int, tuple[OptimizerPart, Callable[..., Any]]] = {}
        self._seen: set[tuple[int, int]] = set()
        self._waiting: dict[tuple[int, int], dict[int, Push]] = {}
        self._updates = 0
        self._ended = Ended()
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
            self._aggregations[number] = Aggregation(aggregation)

    def drop(self, variables: Sequence[int], optimizers: Sequence[int]) -> None:
        """Forget these objects."""
        for number in variables:
            for known in (self._values, self._versions, self._aggregations):
                known.pop(number, None)
        for number in optimizers:
            self._optimizers.pop(number, None)

    def define(self, optimizer: OptimizerPart) -> None:
        """Define an optimizer."""
        self._define(optimizer)

    def _define(self, optimizer: OptimizerPart) -> None:
        tree = jax.tree_util.tree_structure(optimizer.tree)
        self._optimizers[optimizer.number] = optimizer, jax.jit(update_of(optimizer.transformation, tree))

    # --- the state as a whole ---------------------------------------------------------------------------

    def snapshot(self, ended: Ended) -> ServerState:
        """The complete state."""
        self._finish(ended)
        values = {number: np.asarray(value) for number, value in self._values.items()}
        parts = [part for part, _ in self._optimizers.values()]
        waiting = {step: dict(together) for step, together in self._waiting.items()}
        return ServerState(
            values,
            dict(self._versions),
            dict(self._aggregations),
            parts,
            set(self._seen),
            waiting,
            self._updates,
            self._ended.below,
        )

    def restore(self, state: ServerState | None, era: int) -> None:
        """Replace the state by an earlier one; ``None``: an empty one. Ignores messages of other eras from now on."""
        state = state or ServerState({}, {}, {}, [], set(), {}, 0, 0)
        self._ended = Ended(era, state.below)
        self._values = dict(state.values)
        self._versions, self._aggregations = dict(state.versions), dict(state.aggregations)
        self._seen, self._updates = set(state.seen), state.updates
        self._waiting = {step: dict(together) for step, together in state.waiting.items()}
        self._optimizers = {}
        for part in state.optimizers:
            self._define(part)

    def keep(self, state: ServerState) -> None:
        """Store the state of a neighbour, in addition to the previous one, as the others may not get theirs."""
        self._kept.append(state)

    def keep_last(self) -> None:
        """Drop the previous states: all servers have stored new ones."""
        del self._kept[:-1]

    # --- reading and pushing ----------------------------------------------------------------------------

    def pull(self, known: Mapping[int, int], ended: Ended) -> Pulled:
        """The parts of these variables that are newer than the caller's versions (-1: none).

        Args:
          known: the caller's versions.
          ended: the functions that have ended.
        """
        self._finish(ended)
        newer = {
            number: np.asarray(self._values[number])
            for number, version in known.items()
            if number in self._values and self._versions[number] != version
        }
        return Pulled(self._updates, {number: (self._versions[number], part) for number, part in newer.items()})

    def rows(self, number: int, indices: np.ndarray, ended: Ended) -> tuple[int, np.ndarray]:
        """The number of updates so far, and some rows of its part of a variable."""
        self._finish(ended)
        return self._updates, np.asarray(self._values[number])[indices]

    def push(self, push: Push) -> int:
        """Change the parts, now or when the step is complete; returns the number of updates since the function's read.

        A repeated push changes nothing; nor does one that arrives after its function has ended on another worker, or
        after the servers have gone back.
        """
        self._finish(push.ended)
        key = push.function, push.number
        if push.ended.era != self._ended.era or push.function < self._ended.below or key in self._seen:
            return 0
        self._seen.add(key)
        staleness = 0 if push.based_on is None else self._updates - push.based_on
        if self._groups == 1:
            self._update([push])
            return staleness
        self._waiting.setdefault((push.function // self._groups, push.number), {})[push.function] = push
        return staleness

    def break_off(self, ended: Ended) -> None:
        """After a step has failed: drop waiting pushes, except those of complete steps."""
        self._finish(ended)
        self._waiting.clear()

    # --- updates ----------------------------------------------------------------------------------------

    def _finish(self, ended: Ended) -> None:
        """These functions have ended: apply complete steps."""
        if ended.era != self._ended.era or ended.below <= self._ended.below:
            return
        self._ended = ended
        self._seen = {seen for seen in self._seen if seen[0] >= ended.below}
        whole = sorted(step for step in self._waiting if (step[0] + 1) * self._groups <= ended.below)
        for step in whole:
            together = self._waiting.pop(step)
            self._update([together[function] for function in sorted(together)])

    def _update(self, pushes: Sequence[Push]) -> None:
        """Apply one update: the pushes of one step, in the order of their replicas."""
        self._updates += 1
        optimizers = [n for push in pushes for n in push.gradients if n in self._optimizers]
        for number in dict.fromkeys(optimizers):  # without those that the program has dropped meanwhile
            self._optimize(number, [push.gradients[number] for push in pushes if number in push.gradients])
        known = self._values  # and without dropped variables
        for number in dict.fromkeys(n for push in pushes for n in push.added if n in known):
            delta = self._combined(number, [p.added[number] for p in pushes if number in p.added])
            self._set(number, self._with_added(number, delta))
        for number in dict.fromkeys(n for push in pushes for n in push.assigned if n in known):
            [value] = self._combined(number, [p.assigned[number] for p in pushes if number in p.assigned])
            self._set(number, np.array(value) if value.flags.writeable else value)  # others may share it

    def _combined(self, number: int, values: Sequence[Any]) -> list[Any]:
        """The values that the groups of replicas of one step add or assign, combined by the variable's aggregation."""
        how = self._aggregations[number]
        if len(values) == 1 or how in (Aggregation.NONE, Aggregation.ONLY_FIRST_REPLICA):
            return list(values[:1])
        if any(isinstance(value, tuple) for value in values):
            scale = len(values) if how is Aggregation.MEAN else 1
            return [(indices, rows / scale if scale > 1 else rows) for indices, rows in values]
        total = _sum(values)
        return [(total / len(values)).astype(total.dtype) if how is Aggregation.MEAN else total]

    def _optimize(self, number: int, gradients: Sequence[Mapping[int, np.ndarray | Rows]]) -> None:
        optimizer, update = self._optimizers[number]
        values = [self._part(optimizer, v) for v in optimizer.variables]
        state = [self._part(optimizer, s) for s in optimizer.slots]
        dense = [
            _dense([g[v] for g in gradients if v in g], value)
            for v, value in zip(optimizer.variables, values, strict=True)
        ]
        new_values, new_state = update(dense, values, state)
        for v, value in zip((*optimizer.variables, *optimizer.slots), (*new_values, *new_state), strict=True):
            if v in self._values:
                self._set(v, value)

    def _part(self, optimizer: OptimizerPart, number: int) -> Part:
        if number in self._values:
            return self._values[number]
        shape, dtype = optimizer.empty[number]
        return np.zeros(shape, dtype)

    def _with_added(self, number: int, deltas: Sequence[np.ndarray | Rows]) -> np.ndarray:
        """The sum; in the value's own memory, if no other object refers to it."""
        value: Any = self._values[number]
        is_own = isinstance(value, np.ndarray) and value.flags.writeable and value.flags.owndata
        changed = value if is_own else np.empty(value.shape, value.dtype)
        for delta in deltas:
            if not isinstance(delta, tuple):
                np.add(value, delta, out=changed, casting="unsafe")
            else:
                if changed is not value:
                    np.copyto(changed, value)
                np.add.at(changed, *delta)
            value = changed
        return changed

    def _set(self, number: int, value: Part) -> None:
        self._values[number] = value
        self._versions[number] = self._versions.get(number, 0) + 1


def _sum(values: Sequence[Any]) -> np.ndarray:
    total = np.array(values[0])
    for value in values[1:]:
        total += value
    return total


def _dense(gradients: Sequence[np.ndarray | Rows], like: Part) -> Any:
    """The sum of gradients, as an array like ``like``."""
    rows = [g for g in gradients if isinstance(g, tuple)]
    arrays = [g for g in gradients if not isinstance(g, tuple)]
    if not rows:
        return arrays[0] if len(arrays) == 1 else _sum(arrays) if arrays else np.zeros(like.shape, like.dtype)
    total = _sum(arrays) if arrays else np.zeros(like.shape, like.dtype)
    for indices, values in rows:
        np.add.at(total, indices, values)
    return total
