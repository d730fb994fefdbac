"""``map``: a function of each item of a list, on the towers in turn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax import context
from replicax.compat.v1.tower_aggregation import VariableAggregation
from replicax.data import ValueContext
from replicax.strategy import Strategy


class MapOutput:
    """What ``map`` returns: item ``i`` is tower ``i % num_towers``'s. In Replicax it would be a list.

    ``unwrap`` gives each tower's outputs as a list; ``reduce`` combines those of all items: a mean is over items.

    Attributes:
      outputs: for each item, what the function returned.
    """

    def __init__(self, outputs: Sequence[Any], towers: int) -> None:
        self.outputs = list(outputs)
        self._towers = towers

    def __repr__(self) -> str:
        return f"MapOutput({len(self.outputs)} items on {self._towers} towers)"

    def of_towers(self) -> list[list[Any]]:
        """The outputs of each tower: ``replicax.Strategy.local_results``."""
        return [self.outputs[tower :: self._towers] for tower in range(self._towers)]

    def reduced(self, aggregation: VariableAggregation) -> Any:
        """One value of all items': ``replicax.Strategy.reduce``, but by the number of items.

        Raises:
          ValueError: there are no items.
        """
        if not self.outputs:
            raise ValueError("reduce: the output of map over nothing has no sum or mean")
        outputs = self.outputs
        if not context.in_step():
            outputs = jax.device_put(outputs, next(iter(jax.tree_util.tree_leaves(outputs)[0].devices())))
        if aggregation is VariableAggregation.ONLY_FIRST_TOWER:
            return outputs[0]
        combine = jnp.sum if aggregation is VariableAggregation.SUM else jnp.mean
        return jax.tree_util.tree_map(lambda *leaves: combine(jnp.stack(leaves), 0), *outputs)


def mapped(
    strategy: Strategy, items: Iterable[Any], fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> MapOutput:
    """``fn(item, *args, **kwargs)`` for each item: a round of items at a time, one on each tower.

    Inside a step every tower computes all of them.
    """
    items, towers = list(items), strategy.num_replicas_in_sync
    if context.in_step():
        return MapOutput([fn(item, *args, **kwargs) for item in items], towers)
    outputs: list[Any] = []
    for start in range(0, len(items), towers):
        these = items[start : start + towers]
        # Towers for which nothing is left compute some of these items once more, and nobody looks.
        each = strategy.distribute_values_from_function(functools.partial(_item, these))
        results = strategy.local_results([strategy.run(fn, (each, *args), dict(kwargs))])
        outputs += [result for [result] in results[: len(these)]]
    return MapOutput(outputs, towers)


def _item(items: Sequence[Any], ctx: ValueContext) -> Any:
    return items[ctx.replica_id_in_sync_group % len(items)]
