"""Automatic axes: rewrites of operations that JAX and XLA refuse while some axes of a mesh are automatic.

Where replicas have several logical devices, the axes of these are automatic: XLA decides what happens along them. JAX
refuses to call the host from there, and XLA refuses branches whose results are split in different ways. So calls of the
host are made where all axes are manual, by the first logical device of each replica, which tells the others; and what
comes out of a branch has left its split behind. A barrier keeps XLA from computing wrong values of split operands.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from replicax import _jax
from replicax._jax.primitive_families import BRANCHES, FILLED, HOST_CALLS, PADS, PURE_HOST_CALLS, SCATTERS, SPLITS
from replicax.collectives import all_reduce_p, sums_of
from replicax.devices.mesh import REPLICA_AXIS
from replicax.execution.compiled.host_calls import of_watch
from replicax.execution.compiled.program_rewriting import Rewriting, Rule, inside


class AutomaticAxes(Rule):
    """The rule for replicas whose logical devices lie along the axes ``logical``."""

    def __init__(self, logical: tuple[str, ...]) -> None:
        self.logical = logical

    def is_ours(self, equation: Any) -> bool:
        if equation.primitive.name in BRANCHES:
            return _jax.is_or_contains(equation, lambda e: e.primitive.name in SPLITS)
        if equation.primitive is all_reduce_p:
            options = equation.params["options"]
            return options is not None and options.timeout_seconds is not None
        return equation.primitive.name in HOST_CALLS or _is_miscompiled(equation)

    def replaced(self, equation: Any, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        if equation.primitive.name in HOST_CALLS:
            return self.on_first(equation, operands, rewriting)
        if equation.primitive is all_reduce_p:
            program = jax.make_jaxpr(lambda *xs: sums_of(*xs, **equation.params))(*operands).jaxpr
            return rewriting.run(program, operands)
        if _is_miscompiled(equation):
            return rewriting.after(self, equation, [*lax.optimization_barrier(operands[:2]), *operands[2:]])
        branch = inside(lambda jaxpr: _neutral(rewriting.rewritten(jaxpr)))
        return _jax.bind(equation, operands, _jax.map_jaxprs(equation.params, branch))

    def on_first(self, equation: Any, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        """Call the host from the first logical device, unless all may call it; all of them get its answer."""
        # XLA does not know where to make a call without operands and results.
        values = operands or [lax.axis_index(REPLICA_AXIS)]

        def call(equation: Any, values: list[Any]) -> list[Any]:
            if operands or equation.outvars:
                return _jax.bind(equation, values[: len(operands)])
            jax.debug.callback(lambda _: equation.primitive.impl(**equation.params), *values)
            return []

        def ask(*values: Any) -> list[Any]:
            return rewriting.after(self, equation, list(values), call)

        def wait(*values: Any) -> list[Any]:
            return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in equation.outvars]

        def manual(*values: Any) -> list[Any]:
            if equation.primitive.name in PURE_HOST_CALLS and not of_watch(equation):
                return ask(*values)  # all of them: if it fails, it fails for all, and none waits for another
            answers = lax.cond(lax.axis_index(self.logical) == 0, ask, wait, *values)
            return [lax.all_gather(answer, self.logical)[0] for answer in answers]

        everywhere = PartitionSpec()
        results: list[Any] = jax.shard_map(
            manual, axis_names=set(self.logical), in_specs=everywhere, out_specs=everywhere, check_vma=False
        )(*values)
        return results


def _is_miscompiled(equation: Any) -> bool:
    """Whether XLA may compute wrong values, without a barrier before the operands that are split.

    Devices send each other the borders of a value once for all windows of one shape, filled with what the first window
    wants beyond the edges; zeros, as for convolutions, stay without a barrier. A scatter to a single index becomes an
    update of a slice, and that of a slice of the operand, at an index beyond the device's own part.
    """
    name = equation.primitive.name
    if name in SCATTERS:
        return math.prod(equation.invars[1].aval.shape[:-1]) == 1
    if name in PADS:
        return not (isinstance(fill := equation.invars[1], _jax.Literal) and fill.val == 0)
    return name in FILLED


def _neutral(branch: _jax.Jaxpr) -> _jax.Jaxpr:
    """A branch whose results come from an operation that does not say how they are split."""

    def run(*values: Any) -> list[Any]:
        results = _jax.evaluate(branch, values)
        return list(lax.optimization_barrier(results)) if results else []

    return branch if any(map(_jax.is_mutable, branch.invars)) else _jax.traced(run, branch.invars)
