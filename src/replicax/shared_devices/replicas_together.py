"""Replicas together: what several replicas of a device do at the same time, as one operation on the arrays of all.

Sums over replicas of matrix products and convolutions, such as the gradients of weights, are one product, in which the
replicas are contracted with the examples. So no gradient is there for each replica.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax import _jax
from replicax._jax.primitive_families import CASTS, FOREIGN_CALLS, HOST_CALLS, TRANSPOSITIONS, UNBATCHED
from replicax.devices.host_values import is_key
from replicax.execution.program.marks import mark_p
from replicax.shared_devices.local_collectives import widened
from replicax.shared_devices.replica_stages import ReplicaStage, is_action


def can_be_together(stage: ReplicaStage, may_differ: Callable[[Any], bool]) -> bool:
    """Whether several replicas can run ``stage.alone`` at the same time, and each gets what it would alone.

    They can't run operations that act, call other programs or change mutable arrays. Nor a branch in which replicas may
    go different ways: together they would go all of them, and a loop in one may never end for other replicas.
    Nor operations that JAX has no batching for, or random bits of a generator that differ for several keys at once.
    """

    def is_for_one(equation: _jax.Equation) -> bool:
        name, operands = equation.primitive.name, equation.invars
        decides = isinstance(_jax.control_flow_of(equation), _jax.Branches)
        return (
            is_action(equation)
            or name in HOST_CALLS | FOREIGN_CALLS | UNBATCHED
            or any(is_key(dtype_of(v)) and dtype_of(v) != _threefry() for v in operands)
            or any(map(_jax.is_mutable, [*operands, *equation.outvars]))
            or (decides and may_differ(operands[0]))
        )

    return not any(_jax.is_or_contains(equation, is_for_one) for equation in stage.alone)


def dtype_of(value: Any) -> Any:
    """The dtype of a value; ``None`` if it is no array."""
    return getattr(value.aval, "dtype", None)


@functools.cache
def _threefry() -> Any:
    """The dtype of the keys whose bits are the same for one key and for several at once."""
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaTerm:
    """The term of each replica in a sum over replicas."""

    value: Any  # the term
    # The matrix product or convolution that it is, transposed or cast; ``None`` if it is another value.
    product: _jax.Equation | None = None
    moves: tuple[_jax.Equation, ...] = ()  # how the product is transposed and cast, one after the other

    @property
    def parts(self) -> Sequence[Any]:
        """The values of each replica that :meth:`total` needs."""
        return [self.value] if self.product is None else self.product.invars

    def total(self, arrays: Sequence[Any]) -> Any:
        """The sum over replicas, in a dtype in which it is precise, from ``[replicas, *shape]`` of each part."""
        dtype = widened(self.value.aval.dtype)
        if self.product is None:
            return jnp.sum(arrays[0], 0, dtype=dtype)
        lhs, rhs = arrays
        result = _jax.summed_up(self.product, lhs, rhs, widened(dtype_of(self.product.outvars[0])))
        for move in self.moves:
            if move.primitive.name in TRANSPOSITIONS:
                [result] = _jax.bind(move, [result])
        return result.astype(dtype)


def terms_of(stage: ReplicaStage, differ: Callable[[Any], bool]) -> list[ReplicaTerm]:
    """The terms of the sums of a stage."""
    made_by = {v: equation for equation in stage.alone for v in equation.outvars}
    return [_term(value, made_by, differ) for value in stage.summed]


def _term(value: Any, made_by: Mapping[Any, _jax.Equation], differ: Callable[[Any], bool]) -> ReplicaTerm:
    moves: list[_jax.Equation] = []
    source = value
    while source in made_by:
        equation = made_by[source]
        if equation.primitive is mark_p:
            source = equation.invars[equation.outvars.index(source)]
        elif _keeps_sums(equation):
            moves.insert(0, equation)
            [source] = equation.invars
        else:
            is_product = _jax.sums_up(equation) and all(map(differ, equation.invars))
            return ReplicaTerm(value, equation, tuple(moves)) if is_product else ReplicaTerm(value)
    return ReplicaTerm(value)


def _keeps_sums(equation: _jax.Equation) -> bool:
    """Whether a sum may as well be taken before the operation: its precision is then not less."""
    name = equation.primitive.name
    floats = all(jnp.issubdtype(dtype_of(v), jnp.inexact) for v in (*equation.invars, *equation.outvars))
    return name in TRANSPOSITIONS or (name in CASTS and floats)
