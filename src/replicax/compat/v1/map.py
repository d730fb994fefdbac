"""``map``: a function of each item of a list, on the towers in turn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax import context
from replicax.compat.v1.aggregation import VariableAggregation
from replicax.data import ValueContext
from replicax.devices.host_values import check_numbers
from replicax.errors import ContextError
from replicax.pytrees import is_leaf, registered
from replicax.strategy import Strategy
from replicax.values import Components, PerReplica


class MapOutput(PerReplica):
    """The result of ``map``: a :class:`replicax.PerReplica`. Item ``i`` is tower ``i % num_towers``'s.

    ``unwrap`` gives each tower's outputs as a list; ``reduce`` combines those of all items: a mean is over items.

    Attributes:
      outputs: for each item, what the function returned.

    >>> from replicax.compat import v1
    >>> with v1.MirroredStrategy(["cpu:0", "cpu:1"]).scope() as distribution:
    ...     squares = distribution.map([1.0, 2.0, 3.0], lambda item: item**2)
    ...     distribution.reduce("sum", squares), [len(own) for own in distribution.unwrap(squares)]
    (Array(14., dtype=float32), [2, 1])
    """

    __slots__ = ("outputs",)

    def __init__(self, outputs: Sequence[Any], towers: int) -> None:
        self.outputs = list(outputs)
        super().__init__(Components(tuple(self.outputs[tower::towers] for tower in range(towers))))

    def __repr__(self) -> str:
        return f"MapOutput({len(self.outputs)} items on {self.count} towers)"

    def reduced(self, aggregation: VariableAggregation) -> Any:
        """Combine the values of all items: ``replicax.Strategy.reduce``, but by the number of items.

        Raises:
          ValueError: there are no items.
          TypeError: an output is no array of numbers, or is PerDevice itself.
        """
        if not self.outputs:
            raise ValueError("distribution.reduce: the output of map over nothing has no sum or mean")
        for i, output in enumerate(self.outputs):
            for path, leaf in jax.tree_util.tree_flatten_with_path(registered(output), is_leaf=is_leaf)[0]:
                check_numbers(leaf, f"distribution.reduce: the output of map for item {i}{jax.tree_util.keystr(path)}")
        outputs = self.outputs
        arrays = [leaf for leaf in jax.tree_util.tree_leaves(outputs) if isinstance(leaf, jax.Array)]
        if arrays and not context.in_step():
            outputs = jax.device_put(outputs, next(iter(arrays[0].devices())))
        if aggregation is VariableAggregation.ONLY_FIRST_TOWER:
            return outputs[0]
        combine = jnp.sum if aggregation is VariableAggregation.SUM else jnp.mean
        return jax.tree_util.tree_map(lambda *leaves: combine(jnp.stack(leaves), 0), *outputs)


def mapped(
    strategy: Strategy, items: Sequence[Any], fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> MapOutput:
    """``fn(item, *args, **kwargs)`` for each item: a round of items at a time, one on each tower.

    Inside a step every tower computes all of them.

    Raises:
      ContextError: there are several workers, of which each would have the outputs of its own towers only.
    """
    towers = strategy.num_replicas_in_sync
    if context.in_step():
        replica = context.merging_replica()
        assert replica is not None
        with context.replica(replica):
            return MapOutput([fn(item, *args, **kwargs) for item in items], towers)
    if strategy.extended.lockstep.several:
        raise ContextError(
            f"distribution.map: {strategy!r} has several workers, and map is for the towers of one: use "
            "call_for_each_tower, in which each tower takes its items by its tower_id"
        )
    outputs: list[Any] = []
    for start in range(0, len(items), towers):
        these = items[start : start + towers]
        # Towers for which nothing is left compute some of these items once more; their results are dropped.
        each = strategy.distribute_values_from_function(functools.partial(_item, these))
        results = strategy.local_results([strategy.run(fn, (each, *args), dict(kwargs))])
        outputs += [result for [result] in results[: len(these)]]
    return MapOutput(outputs, towers)


def _item(items: Sequence[Any], ctx: ValueContext) -> Any:
    return items[ctx.replica_id_in_sync_group % len(items)]
