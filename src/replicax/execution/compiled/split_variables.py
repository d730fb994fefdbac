"""Split variables: run a program on pieces of its variables.

A variable that is split over the replicas, or over those of each group, enters a program as this replica's piece. What
is computed from pieces element by element stays in pieces: an optimizer's update of them, a cast to another dtype. What
needs the whole (a matrix product) gets it, gathered at each of its uses, so that it is free afterwards and gathered
again for the backward pass. A sum over the replicas of which only a piece is needed, such as that of a gradient,
becomes a reduce-scatter. The step contains nothing of this: it follows from the layouts of the variables.

Only values that are the same on every replica can be in pieces; which these are is known from
:mod:`replicax.execution.program.infer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from replicax import _jax
from replicax._jax.operation_params import dims_along, dropping, lookup_dimensions, reduced_along
from replicax._jax.primitive_families import (
    CASTS,
    CHECKPOINTS,
    ELEMENTWISE,
    IDEMPOTENT_REDUCTIONS,
    MOVING,
    SCANS,
    SCATTERS,
    SPLITS,
    SUMS,
)
from replicax.collectives import all_reduce_p
from replicax.devices.summation_order import added_along, all_but_last, elements_p, last_of
from replicax.execution.compiled.loop_sums import LoopSum, WantedSum, loop_plan, uses_in, wanted_sums
from replicax.execution.compiled.pieces import (
    Gathers,
    Piece,
    gathered,
    own_piece,
    stacked_parts,
    start_of_own,
    summed_parts,
    summed_pieces,
    without_dims,
)
from replicax.execution.compiled.wanted_pieces import PASSED_ON, inlined, may_scatter, says_nothing_new, wanted_pieces
from replicax.locality import Locality, M, T
from replicax.variables.layout import Layout, Split

_INDICES = 64  # few enough to be computed again with a move of elements; a batch of rows to look up is not


@dataclasses.dataclass(frozen=True, eq=False)
class _Later:
    """A value that is computed from pieces again for each use, because keeping the whole would take its memory.

    Only for operations that are cheap beside the gather: moving or casting elements.
    """

    equation: Any
    operands: Sequence[Any]


class Partition:
    """The pass over one program; with ``in_order``, sums have a fixed order, whatever is in pieces."""

    def __init__(self, localities: Mapping[Any, Locality], gathers: Gathers, in_order: bool) -> None:
        self.localities = localities
        self.gathers = gathers
        self.in_order = in_order

    def run(
        self,
        jaxpr: _jax.Jaxpr,
        values: Sequence[Any],
        wanted: Sequence[Split | None],
        sums: Mapping[Any, WantedSum] | None = None,
    ) -> list[Any]:
        """Apply ``jaxpr`` to whole values and :class:`Piece`; return such.

        ``wanted`` has the pieces in which each result will be needed, if any; it may still come whole. ``sums`` are
        those results of which only pieces of sums over the replicas will be needed; they may come as such pieces.
        """
        hints = wanted_pieces(jaxpr, wanted)
        sunk = wanted_sums(jaxpr, hints, sums)

        def results_of(equation: _jax.Equation, operands: list[Any]) -> list[Any]:
            if equation.primitive.name in SCANS:
                results = self.scan(equation, operands, sunk)
            else:
                results = self.equation(equation, operands, hints)
            self.gathers.computed(results)
            return results

        return _jax.interpret(jaxpr, values, results_of)

    def whole(self, value: Any) -> Any:
        """A value as every replica has it."""
        if isinstance(value, Piece):
            return self.gathers.whole(value)
        if isinstance(value, _Later):
            return _jax.bind(value.equation, [self.whole(v) for v in value.operands])[0]
        return value

    def piece(self, value: Any, split: Split) -> Any:
        """This replica's piece of a value."""
        if isinstance(value, Piece) and value.split == split:
            return value.array
        return own_piece(self.whole(value), split)

    def leaving(self, value: Any, split: Split) -> Any:
        """This replica's piece of a result, filled up with zeros: NaNs there would look like computed ones."""
        array = self.piece(value, split)
        if not split.filling or not isinstance(value, Piece):
            return array
        return jnp.where(_index(array, split) < split.size, array, jnp.zeros_like(array))

    # --- operations -------------------------------------------------------------------------------------

    def equation(self, equation: Any, operands: list[Any], hints: Mapping[Any, Split]) -> list[Any]:
        name = equation.primitive.name
        if equation.primitive in PASSED_ON:
            return operands
        if equation.primitive is all_reduce_p:
            return self.all_reduce(equation, operands, hints)
        if isinstance(operands[0] if operands else None, Piece) and says_nothing_new(equation, operands[0].split):
            return operands
        in_pieces = any(map(_in_pieces, operands))
        called = inlined(equation)
        if called is not None and (in_pieces or any(v in hints for v in equation.outvars)):
            return self.run(called, operands, [hints.get(v) for v in equation.outvars])
        if not in_pieces:
            return _jax.bind(equation, operands)
        if name in ELEMENTWISE and (summed := [v for v in operands if isinstance(v, Piece) and v.summed]):
            return summed  # the loop has done it
        if name in ELEMENTWISE and self.all_mirrored(equation):
            return [self.elementwise(equation, operands, hints)]
        if name in MOVING | SPLITS and self.all_mirrored(equation) and all(map(_is_small_or_in_pieces, operands)):
            return [_Later(equation, operands)]
        if name in CHECKPOINTS:
            return self.checkpoint(equation, operands)
        if name in SUMS | IDEMPOTENT_REDUCTIONS and isinstance(operands[0], Piece):
            return [self.reduction(equation, operands[0])]
        if equation.primitive is elements_p and isinstance(operands[0], Piece):
            return [self.elements(equation, operands[0])]
        if name in SCATTERS and self.all_mirrored(equation) and _changes_rows(equation, operands[0]):
            return [self.changed_rows(equation, operands)]
        return self.on_whole(equation, operands)

    def checkpoint(self, equation: Any, operands: list[Any]) -> list[Any]:
        """A ``jax.checkpoint``, on whole values. A piece that it only casts to a narrower dtype is cast before."""
        [jaxpr] = _jax.sub_jaxprs(equation)
        known = _narrowing_casts(jaxpr)
        casts = [known.get(v) if isinstance(x, Piece) else None for v, x in zip(jaxpr.invars, operands, strict=True)]
        if all(c is None for c in casts):
            return self.on_whole(equation, operands)  # as the same program, which is lowered once for all its uses
        invars = [v if c is None else c.outvars[0] for v, c in zip(jaxpr.invars, casts, strict=True)]
        operands = [x if c is None else self.elementwise(c, [x], {}) for x, c in zip(operands, casts, strict=True)]
        done = set(map(id, casts))
        inner = _jax.replace_inputs(jaxpr, invars, [e for e in jaxpr.eqns if id(e) not in done], jaxpr.outvars)
        return self.on_whole(equation, operands, _jax.map_jaxprs(equation.params, lambda _: inner))

    def on_whole(self, equation: Any, operands: list[Any], params: Any = None) -> list[Any]:
        """Any other operation, on the whole values, perhaps with other ``params``."""
        if not any(map(_in_pieces, operands)):
            return _jax.bind(equation, operands, params)
        whole = [self.whole(v) for v in operands]
        self.gathers.used_with([w for w, v in zip(whole, operands, strict=True) if w is v])
        return _jax.bind(equation, whole, params)

    def all_mirrored(self, equation: Any) -> bool:
        return all(self.localities.get(v, M) is not T for v in _jax.without_literals(equation.invars))

    def elementwise(self, equation: Any, operands: list[Any], hints: Mapping[Any, Split]) -> Any:
        [result] = equation.outvars
        if not any(isinstance(v, Piece) for v in operands):
            if len(operands) == 1:  # usually a cast
                return _Later(equation, operands)
            return self.on_whole(equation, operands)[0]
        split = hints.get(result) or next(v.split for v in operands if isinstance(v, Piece))

        def local(value: Any, shape: tuple[int, ...]) -> Any:
            # Scalars, and dims of size 1, go with everything.
            return self.piece(value, split) if shape and shape[split.dim] == split.size else self.whole(value)

        values = [local(value, atom.aval.shape) for value, atom in zip(operands, equation.invars, strict=True)]
        return Piece(_jax.bind(equation, values)[0], split)

    def reduction(self, equation: Any, operand: Piece) -> Any:
        split = operand.split
        dims = dims_along(equation.params, operand.array.ndim)
        if split.dim not in dims:
            shifted = without_dims(split, dims)
            return Piece(_jax.bind(equation, [operand.array])[0], shifted)
        array = operand.array
        if equation.primitive.name in SUMS:
            if split.filling:
                array = jnp.where(_index(array, split) < split.size, array, jnp.zeros_like(array))
            return summed_parts(_jax.bind(equation, [array])[0], split)
        if split.filling:
            array = jnp.where(_index(array, split) < split.size, array, lax.slice_in_dim(array, 0, 1, axis=split.dim))
        parts = stacked_parts(_jax.bind(equation, [array])[0], split)
        filled = -(-split.size // split.piece)  # the others have nothing but filling
        return _jax.bind(equation, [parts[:filled]], reduced_along(equation.params, [0]))[0]

    def elements(self, equation: Any, operand: Piece) -> Any:
        """A sum of elements in order: each piece is added up along all dims but the last, and then gathered."""
        split, dims = operand.split, equation.params["along"]
        if split.dim not in dims:
            return Piece(_jax.bind(equation, [operand.array])[0], without_dims(split, dims))
        if split.dim != last_of(equation.invars[0].aval.shape, dims):
            return self.on_whole(equation, [operand])[0]
        part = gathered(all_but_last(operand.array, dims, split.dim), split)
        return lax.squeeze(added_along(part, split.dim), dims)

    def changed_rows(self, equation: Any, operands: list[Any]) -> Piece:
        """Set rows, or add to them: each replica takes those that are in its piece, and drops the others."""
        piece, indices, updates = operands[0], self.whole(operands[1]), self.whole(operands[2])
        start = start_of_own(piece.split).astype(indices.dtype)
        params = dropping(equation.params)
        return Piece(_jax.bind(equation, [piece.array, indices - start, updates], params)[0], piece.split)

    def all_reduce(self, equation: Any, operands: list[Any], hints: Mapping[Any, Split]) -> list[Any]:
        if not may_scatter(equation):
            hints = {}
        results: list[Any] = [None] * len(operands)
        ready = [i for i, v in enumerate(operands) if isinstance(v, Piece) and v.summed]
        for i in ready:
            results[i] = dataclasses.replace(operands[i], summed=False)
        pieces = [i for i, v in enumerate(equation.outvars) if v in hints and i not in ready]
        others = [i for i, v in enumerate(equation.outvars) if v not in hints]
        splits = [hints[equation.outvars[i]] for i in pieces]
        for i, split, array in zip(
            pieces,
            splits,
            summed_pieces([self.whole(operands[i]) for i in pieces], splits, in_group=False, in_order=self.in_order),
            strict=True,
        ):
            results[i] = Piece(array, split)
        if others:
            sums = all_reduce_p.bind(*(self.whole(operands[i]) for i in others), **equation.params)
            for i, total in zip(others, sums, strict=True):
                results[i] = total
        return results

    def scan(self, equation: Any, operands: list[Any], sunk: Mapping[Any, WantedSum]) -> list[Any]:
        """A loop over slices of a split variable, such as a stack of layers, or over the replicas of a device.

        Each slice is gathered in its iteration; and if the loop makes the gradient of the stack, slice by slice,
        the sum of each over the replicas is scattered at once. In a loop over the replicas of a device, large values
        are gathered again in each iteration, and each term of a sum over these replicas is summed over the devices and
        scattered at once. So a device never has all of the model, or of its gradients.
        """
        loop = _jax.scan_of(equation.params)
        n_consts, n_carry = loop.constants, loop.carried
        plan = loop_plan(equation, loop, sunk)
        sliced = operands[n_consts + n_carry :]
        splits = [v.split if isinstance(v, Piece) and v.split.dim > 0 else None for v in sliced]
        consts = [v if stays else self.whole(v) for v, stays in zip(operands[:n_consts], plan.shared, strict=True)]
        if not any(splits) and not any(plan.sums) and not any(map(_in_pieces, consts)):
            return self.on_whole(equation, [*consts, *operands[n_consts:]])
        inner = [None if s is None else without_dims(s, [0]) for s in splits]

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            values = [*consts, *carry, *(x if s is None else Piece(x, s) for x, s in zip(xs, inner, strict=True))]
            gathers = Gathers(self.gathers.ahead, None if plan.number is None else values[plan.number])
            iteration = Partition(self.localities, gathers, self.in_order)
            results = iteration.summed(iteration.run(plan.body, values, [], plan.wanted()), plan.sums)
            totals = zip(carry, results, plan.sums, strict=False)
            return [x if s is None else lax.add(before, x) for before, x, s in totals], results[n_carry:]

        start = zip(operands[n_consts : n_consts + n_carry], plan.sums, strict=False)
        with _jax.from_line_of(equation):
            carry, stacked = lax.scan(
                body,
                [self.whole(v) if s is None else self.piece(v, s.split) for v, s in start],  # totals begin with zeros
                [self.whole(v) if s is None else v.array for v, s in zip(sliced, splits, strict=True)],
                length=loop.length,
                reverse=loop.reverse,
                unroll=loop.unroll,
            )
        return [x if s is None else s.result(x) for x, s in zip([*carry, *stacked], plan.sums, strict=True)]

    def summed(self, values: Sequence[Any], sums: Sequence[LoopSum | None]) -> list[Any]:
        """The results of an iteration: pieces of the sums over the replicas, and anything else whole."""
        arrays = [v.array if isinstance(v, Piece) and v.summed else None for v in values]
        for in_group in (False, True):
            late = [
                (i, s) for i, s in enumerate(sums) if s is not None and s.in_group is in_group and arrays[i] is None
            ]
            summands = [s.summand(self.whole(values[i])) for i, s in late]
            for (i, _), piece in zip(
                late, summed_pieces(summands, [s.of_iteration for _, s in late], in_group, self.in_order), strict=True
            ):
                arrays[i] = piece
        return [self.whole(v) if array is None else array for v, array in zip(values, arrays, strict=True)]


def _narrowing_casts(jaxpr: _jax.Jaxpr) -> dict[Any, Any]:
    """The casts to a narrower dtype in a program, by the values that they take, if nothing else takes these."""
    equations: list[Any] = jaxpr.eqns
    uses = uses_in(jaxpr)
    return {
        v: e
        for e in equations
        if e.primitive.name in CASTS
        for v in _jax.without_literals(e.invars)
        if uses[v] == 1 and e.outvars[0].aval.dtype.itemsize < v.aval.dtype.itemsize
    }


def _in_pieces(value: Any) -> bool:
    return isinstance(value, Piece | _Later)


def _is_small_or_in_pieces(value: Any) -> bool:
    return _in_pieces(value) or jnp.size(value) <= _INDICES


def _changes_rows(equation: Any, target: Any) -> bool:
    """Whether a scatter changes whole rows of what is split by rows."""
    if not isinstance(target, Piece) or target.split.dim != 0 or dropping(equation.params) is None:
        return False
    if target.split.logical_parts > 1:
        return False
    dims = lookup_dimensions(equation.params, target.array.ndim)
    return dims.indexed == (0,) and set(dims.windows) == set(range(1, target.array.ndim))


def _index(piece: Any, split: Split) -> Any:
    """The index in the whole of each element of this replica's piece, along the dim that is split."""
    return start_of_own(split) + lax.broadcasted_iota(jnp.int32, piece.shape, split.dim)


def evaluated(
    jaxpr: _jax.Jaxpr,
    values: Sequence[Any],
    wanted: Sequence[Layout],
    localities: Mapping[Any, Locality] | None,
    in_order: bool = False,
) -> list[Any]:
    """Apply ``jaxpr`` to one replica's whole values and :class:`Piece`.

    Results that are ``wanted`` in pieces come as this replica's pieces, as bare arrays, and the others whole.
    ``localities`` are those of the values in the program; ``None`` if there are no pieces. With ``in_order`` sums have
    a fixed order.
    """
    if localities is None:
        return _jax.called(jaxpr, values)
    splits = [layout if isinstance(layout, Split) else None for layout in wanted]
    sizes = [x.array.size * x.array.dtype.itemsize * x.split.replicas for x in values if isinstance(x, Piece)]
    run = Partition(localities, Gathers(ahead=2 * max(sizes, default=0)), in_order)
    results = run.run(jaxpr, values, splits)
    return [run.whole(v) if s is None else run.leaving(v, s) for v, s in zip(results, splits, strict=True)]
