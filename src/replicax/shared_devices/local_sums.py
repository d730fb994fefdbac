"""Local sums: sums over the replicas, of which a device first adds up those of its own.

Where nothing but the sum of a value is needed, it is added up in the loop over the replicas, term by term.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from replicax import _jax
from replicax.collectives import all_reduce_p, sums_of_blocks
from replicax.devices.mesh import REPLICA_AXIS
from replicax.devices.summation_order import added_in_pairs
from replicax.execution.compiled.local_values import Each
from replicax.shared_devices.local_collectives import widened
from replicax.shared_devices.replica_stages import is_sum
from replicax.shared_devices.term_blocks import Blocks


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class LocalTotal:
    """The sum of a value over this device's replicas, of which nothing else is needed.

    In a fixed order that is ``[blocks, *shape]``: the sums of blocks of these replicas.
    """

    array: Any


class LocalSums:
    """Sums over the ``per_device`` replicas of a device, and over all ``count`` on all devices; perhaps in order."""

    def __init__(self, count: int, per_device: int, in_order: bool) -> None:
        self.count = count
        self.per_device = per_device
        self.blocks = Blocks.of(per_device) if in_order else None

    # --- term by term -----------------------------------------------------------------------------------

    def no_terms(self, values: Sequence[Any]) -> list[Any]:
        """The totals of values of a program before the first term."""
        none = jnp.zeros if self.blocks is None else self.blocks.no_terms
        return [none(v.aval.shape, widened(v.aval.dtype)) for v in values]

    def with_terms(self, totals: Sequence[Any], terms: Sequence[Any], number: Any) -> list[Any]:
        """The totals after one more term of each, that of the replica with this number."""
        if self.blocks is not None:
            return self.blocks.with_term(totals, terms, number % self.per_device)
        return [lax.add(a, b) for a, b in zip(totals, terms, strict=True)]

    def finished(self, totals: Sequence[Any], values: Sequence[Any]) -> list[LocalTotal]:
        """The totals of values of a program when all terms have come."""
        if self.blocks is not None:
            return [LocalTotal(self.blocks.sums(total)) for total in totals]
        return [LocalTotal(total.astype(v.aval.dtype)) for total, v in zip(totals, values, strict=True)]

    def of_one(self, term: Any) -> LocalTotal:
        """The total on a device that has one replica."""
        return LocalTotal(term if self.blocks is None else wide(term)[None])

    # --- over all replicas ------------------------------------------------------------------------------

    def reduced(self, equation: _jax.Equation, operands: Sequence[Any], reduce: Callable[..., Any]) -> list[Any]:
        """The results of a collective of JAX's that reduces over all replicas."""
        if self.blocks is not None and is_sum(equation):
            return self._in_order(operands, equation.outvars, self.blocks, None)
        return _jax.bind(equation, [self._together(v, reduce, is_sum(equation)) for v in operands])

    def all_reduce(self, equation: _jax.Equation, operands: Sequence[Any]) -> list[Any]:
        """The results of a sum over all replicas that is one of ours."""
        if self.blocks is not None:
            return self._in_order(operands, equation.outvars, self.blocks, equation.params["options"])
        local = [self._together(v, jnp.sum, is_a_sum=True) for v in operands]
        if self.per_device == self.count:
            return local
        return list(all_reduce_p.bind(*local, **{**equation.params, "per_device": self.per_device}))

    def in_group(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        """The function that reduces the values of a group of replicas, along a dim."""
        if self.blocks is None or reduce is not jnp.sum:
            return reduce
        return lambda array, dim: added_in_pairs(jnp.moveaxis(wide(array), dim, 0))

    def _together(self, value: Any, reduce: Callable[..., Any], is_a_sum: bool) -> Any:
        """A value reduced over the replicas of this device, before the collective of the devices."""
        if isinstance(value, LocalTotal):
            return value.array
        if isinstance(value, Each):
            return reduce(value.array, 0).astype(value.array.dtype)
        value = jnp.asarray(value)
        return value * jnp.asarray(self.per_device, value.dtype) if is_a_sum else value

    def _in_order(self, operands: Sequence[Any], results: Sequence[Any], blocks: Blocks, options: Any) -> list[Any]:
        """The sums over all replicas, in their fixed order."""
        of_blocks = [self._in_blocks(v, blocks) for v in operands]
        if blocks.count == 1:  # as one sum, of which devices may need pieces only
            params = {"axes": (REPLICA_AXIS,), "options": options, "per_device": self.per_device, "in_order": True}
            sums = all_reduce_p.bind(*(x[0] for x in of_blocks), **params)
        else:
            sums = sums_of_blocks(of_blocks, options, self.per_device)
        return [total.astype(v.aval.dtype) for total, v in zip(sums, results, strict=True)]

    def _in_blocks(self, value: Any, blocks: Blocks) -> Any:
        """``[blocks, *shape]``: the sums of a value over the blocks of this device's replicas."""
        if isinstance(value, LocalTotal):
            return value.array
        if not isinstance(value, Each):
            value = jnp.asarray(value)
            value = Each(jnp.broadcast_to(value, (self.per_device, *value.shape)))
        array = wide(value.array)
        terms = array.reshape(blocks.count, len(array) // blocks.count, *array.shape[1:])
        return added_in_pairs(jnp.moveaxis(terms, 1, 0))


def wide(term: Any) -> Any:
    """A term of a sum, in the dtype in which it is added up."""
    return term.astype(widened(term.dtype))
