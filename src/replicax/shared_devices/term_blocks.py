"""Blocks of terms: how a device adds up those of its replicas in a fixed order, one after the other.

The order is that of :mod:`replicax.devices.summation_order`: a block is a node of its tree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from replicax.devices.summation_order import FAN, added_in_pairs


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """The order in which a device adds up its terms, which come one after the other.

    A loop keeps the sums of pairs. When it has four of them it adds them up, and their sum is a term of the next such
    array; so a loop over ``8**i`` terms keeps ``i`` arrays. It updates all of them in place.
    """

    # How many terms each array is for: powers of two, and at the end an odd number if it is more than 1.
    fans: tuple[int, ...]

    @classmethod
    def of(cls, terms: int) -> Blocks:
        """The order for ``terms`` neighbouring terms on each device."""
        fans = []
        while terms % 2 == 0:
            fans.append(min(terms & -terms, FAN))
            terms //= fans[-1]
        return cls((*fans, terms) if terms > 1 else tuple(fans))

    @property
    def count(self) -> int:
        """The number of the largest blocks of which the device has all terms: an odd number."""
        return self.fans[-1] if self.fans and self.fans[-1] % 2 else 1

    def no_terms(self, shape: tuple[int, ...], dtype: Any) -> Known:
        """The state before the first term: room for sums of pairs, of terms and of blocks."""
        return [jnp.zeros((fan if fan % 2 else fan // 2, *shape), dtype) for fan in self.fans]

    def with_term(self, known: Sequence[Known], terms: Sequence[Any], number: Any) -> list[Known]:
        """The state after one more term of each sum: adds sums of complete blocks."""
        fan, *rest = self.fans
        paired = [_with_term(k[0], term, number % fan, fan % 2 == 0) for k, term in zip(known, terms, strict=True)]
        if not rest:
            return [[pairs] for pairs in paired]

        def add(state: tuple[Any, list[Known]]) -> tuple[Any, list[Known]]:
            totals = [added_in_pairs(pairs) for pairs in paired]
            return jnp.bool_(False), Blocks(tuple(rest)).with_term(state[1], totals, number // fan)

        # No branch: XLA would copy its results.
        complete = number % fan == fan - 1
        _, larger = lax.while_loop(lambda state: state[0], add, (complete, [k[1:] for k in known]))
        return [[pairs, *k] for pairs, k in zip(paired, larger, strict=True)]

    def sums(self, known: Known) -> Any:
        """``[count, *shape]``: the sums of the blocks, after all terms."""
        return known[-1] if self.count > 1 else added_in_pairs(known[-1])[None]


Known = list[Any]
"""The state of a sum on a device: an array for each of the fans."""


def _with_term(sums: Any, term: Any, number: Any, in_pairs: bool) -> Any:
    """Add one more term to the sums of pairs; or keep it as a term."""
    if not in_pairs:
        return lax.dynamic_update_index_in_dim(sums, term, number, 0)
    # One non-negative index for both, so that the compiler sees that they are in the same place.
    place = [(number // 2).astype(jnp.uint32), *[jnp.uint32(0)] * term.ndim]
    before = lax.dynamic_slice(sums, place, (1, *term.shape))
    return lax.dynamic_update_slice(sums, jnp.where(number % 2 == 1, before + term[None], term[None]), place)
